"""A process that belongs to another one: it says that it is there, and waits for a signal that may have come before."""

import signal

from moc.runtime.child_processes import belong
from moc.runtime.termination import STOPS

if __name__ == "__main__":
    belong()
    print("there", flush=True)
    print(signal.sigwait(STOPS).name, flush=True)
    signal.pause()
