"""Keeps what works beside training out of its way: off its processor, and not for long in Python's interpreter.

A thread that is woken to copy or to hash is often put on the processor that trains, where it ran before; training then
waits for milliseconds although another processor is idle.  On that other processor it still competes for the
interpreter: it takes it for each call and hands it on to whoever was first to wait, who may not run yet, and training
sleeps until the interval is over after which it asks again.  Each alone saves little, since the one wait turns into the
other; both together, most (``docs/results/selective-overhead.md``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterable

SWITCH_S = 1e-4
"""Python's switch interval beside snapshots; its default of 5 ms is as long as a whole copy."""

_BESIDE, _WITH = "snapshot-", "event-log"
"""What threads are called that work beside training, and those that it waits for."""

_LIBC = ctypes.CDLL(None)


def share_interpreter() -> None:
    """Lets a thread that waits for the interpreter ask for it sooner; for the whole process."""
    sys.setswitchinterval(SWITCH_S)


class Aside:
    """Keeps threads and processes off the processor that trains, if one is left over for them.

    Args:
        workers: of this node, each of which trains on a processor of its own.
    """

    def __init__(self, workers: int):
        self._workers, self._moved = workers, None

    def move(self, processes: Iterable[int] = ()) -> None:
        """Moves this process's threads for snapshots, and other processes; the thread that trains calls it.

        They may use the processors that it may use, but the one that it runs on now, which is left to those that it
        waits for.  Processes run when no thread wants the processor: whoever waits for such a thread would wait for
        them too.
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
                with contextlib.suppress(OSError):  # it has ended, or the machine does not allow it
                    os.sched_setaffinity(one, there)
        for process in processes:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))


def _processor() -> int:
    """The processor that the calling thread runs on."""
    return _LIBC.sched_getcpu()
