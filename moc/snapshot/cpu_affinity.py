"""Keeps background threads off the training core and limits how long they hold the GIL.

A woken thread that copies or hashes often runs on the training core, where it ran before. Training then waits for
milliseconds although another core is idle. On another core, the thread still competes for the GIL. It takes the GIL for
each call and passes it to the first waiting thread, which may not run yet. Training then sleeps until its switch
interval ends. Applied separately, the two measures save little, since one wait turns into the other; together they save
most (``docs/results/selective-overhead.md``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterable

SWITCH_S = 1e-4
"""Python's switch interval during snapshots; its default of 5 ms is as long as a complete copy."""

_BESIDE, _WITH = "snapshot-", "event-log"
"""Name prefixes of background threads, and of threads that training waits for."""

_LIBC = ctypes.CDLL(None)


def share_interpreter() -> None:
    """Lets waiting threads of this process request the GIL sooner."""
    sys.setswitchinterval(SWITCH_S)


class Aside:
    """Keeps background threads and processes off the training core if another core is left.

    Args:
        workers: number of workers on this node, each with its own training core.
    """

    def __init__(self, workers: int):
        self._workers, self._moved = workers, None

    def move(self, processes: Iterable[int] = ()) -> None:
        """Moves this process's background threads, and other processes, off the current core.

        The training thread calls it. Background threads and processes may use the other cores that it may use. The
        current core is left to training and the threads that it waits for. Processes run only when no thread needs
        their core; otherwise training could wait for them through such a thread.
        """
        allowed = os.sched_getaffinity(0)
        if len(allowed) <= self._workers:
            return
        here, threads = _processor(), threading.enumerate()
        beside, waited = (
            {one.native_id for one in threads if one.native_id is not None and one.name.startswith(name)}
            for name in (_BESIDE, _WITH)
        )
        now = here, allowed, beside | {*processes}, waited
        if now == self._moved:
            return
        self._moved = now
        for ones, there in ((now[2], allowed - {here}), (waited, {here})):
            for one in ones:
                with contextlib.suppress(OSError):  # it has ended, or the machine forbids it
                    os.sched_setaffinity(one, there)
        for process in processes:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))


def _processor() -> int:
    """Returns the core that the calling thread runs on."""
    return _LIBC.sched_getcpu()
