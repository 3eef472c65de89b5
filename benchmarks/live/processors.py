"""Keeps all processors busy, so that the speed of one does not depend on the load of the others.

Processors that share a core or its clock are faster while others are idle, unlike accelerators: a waiting worker would
speed up the worker that it waits for.  Therefore a process on each processor uses its idle time for matrix products
that stay in its caches.  It has the lowest priority, so that any other process preempts it immediately.  As a program,
this is the process for the processor with the given number.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def none_idle() -> Iterator[None]:
    """Uses the idle time of all processors that this process may use, as a context manager."""
    count = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, __file__, str(n)], start_new_session=True) for n in range(count)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def own_processor(number: int) -> None:
    """Pins this process, and the threads that it starts afterwards, to one processor."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[number % len(allowed)]})


def use_up(number: int) -> None:
    """Uses the idle time of a processor until the parent process ends."""
    own_processor(number)
    parent = os.getppid()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # Linux may divide time between sessions first: give this session the least
        Path("/proc/self/autogroup").write_text("19")
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    some, other = torch.ones(64, 64), torch.empty(64, 64)
    while os.getppid() == parent:
        for _ in range(1000):
            torch.mm(some, some, out=other)


if __name__ == "__main__":
    use_up(int(sys.argv[1]))
