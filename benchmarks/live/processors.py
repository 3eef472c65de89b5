"""Processors of which nothing is left idle, so that one is as fast whatever the other does.

Processors that share a core or its clock are faster while others are idle, as accelerators are not: a worker that waits
would speed up the one it waits for.  Therefore a process on each uses up what is left of it, by matrix products that
stay in its caches, at the lowest priority: whatever else has something to do takes its place at once.  As a program,
this is the one on the processor of that number.
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
    """Meanwhile, whatever others leave of the processors that this process may use is used up."""
    count = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, __file__, str(n)], start_new_session=True) for n in range(count)]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def own_processor(number: int) -> None:
    """Keeps this process, and the threads that it starts from now on, on one processor."""
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[number % len(allowed)]})


def use_up(number: int) -> None:
    """Uses up what others leave of a processor, as long as the process lives that has started this one."""
    own_processor(number)
    parent = os.getppid()
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # Linux may share time out between sessions first: this one gets the least
        Path("/proc/self/autogroup").write_text("19")
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    some, other = torch.ones(64, 64), torch.empty(64, 64)
    while os.getppid() == parent:
        for _ in range(1000):
            torch.mm(some, some, out=other)


if __name__ == "__main__":
    use_up(int(sys.argv[1]))
