"""A process that belongs to another one: it says that it is there, and waits for a signal that may have come before."""

import signal

from moc.runtime.child_processes import attach_to_parent
from moc.runtime.termination import STOP_SIGNALS

if __name__ == "__main__":
    attach_to_parent()
    print("there", flush=True)
    print(signal.sigwait(STOP_SIGNALS).name, flush=True)
    signal.pause()
