"""Runs the training program and kills it with SIGKILL after a given iteration.

    DIES_AFTER=100 python -m benchmarks.accuracy.mortal FLAGS

Every worker is killed. Without ``DIES_AFTER`` this is ``pretrain_gpt_moe.py`` with the same flags.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from moc.events import EventLog


def die_after(iteration: int) -> None:
    """Kills this process, in any worker, after it writes the event of an iteration."""
    write = EventLog.write

    def write_and_die(log: EventLog, event: str, **fields) -> None:
        write(log, event, **fields)
        if event == "iteration" and fields["iteration"] == iteration:
            os.kill(os.getpid(), signal.SIGKILL)

    events: Any = EventLog  # Any: a method is replaced
    events.write = write_and_die


def main() -> int:
    """Runs the training program and returns its exit code."""
    if "DIES_AFTER" in os.environ:
        die_after(int(os.environ["DIES_AFTER"]))
    import pretrain_gpt_moe

    return pretrain_gpt_moe.main()


if __name__ == "__main__":
    sys.exit(main())
