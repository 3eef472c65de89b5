"""Until when the workers of a node may run, in memory that they share with their agent.

The agent renews it whenever the controller answers.  It ends while the agent is stopped, too, or cannot reach anybody,
and then others may have the places of its workers: they must not publish anything any more.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import signal
import sys
import time

from moc.runtime import environment

_BYTES = 8


class Lease:
    """One number, in seconds of the machine's monotonic clock; infinity where nobody else could have the places.

    Args:
        descriptor: of the shared memory; it stays open.
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._end = ctypes.c_double.from_buffer(mmap.mmap(descriptor, _BYTES))

    @classmethod
    def make(cls) -> Lease:
        """A new one, for an agent; it has no end yet."""
        descriptor = os.memfd_create("moc-lease")
        os.truncate(descriptor, _BYTES)
        lease = cls(descriptor)
        lease.end = math.inf
        return lease

    @classmethod
    def of_this_worker(cls) -> Lease | None:
        """The one that this process runs under; None outside of a job of our launcher."""
        text = os.environ.get(environment.LEASE)
        return None if text is None else cls(int(text))

    @property
    def end(self) -> float:
        """When it ends."""
        return self._end.value

    @end.setter
    def end(self, at: float) -> None:
        self._end.value = at

    @property
    def left(self) -> float:
        """Seconds until it ends; negative when it is over."""
        return self.end - time.monotonic()

    def enforce(self) -> None:
        """Ends this process if the lease is over: another one may have its place."""
        if self.left <= 0:
            print(
                f"mocrun: worker {os.environ.get('RANK')} has heard of no controller for too long, and ends itself: "
                "another one may have its place",
                file=sys.stderr,
                flush=True,
            )
            os.kill(os.getpid(), signal.SIGKILL)  # as when its agent does it: it is lost, and has not failed
