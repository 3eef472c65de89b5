"""The time until which a node's workers may run, in memory shared with their agent.

The agent renews the lease whenever the controller answers.  While the agent is stopped or cut off, the lease expires,
and others may take the workers' places: these workers must publish nothing from then on.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import signal
import time

from moc.output import print_lines
from moc.runtime import environment

_BYTES = 8


class Lease:
    """Expiry time, in seconds of the machine's monotonic clock; infinite if no other worker can take the places.

    The descriptor of the shared memory stays open.
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._end = ctypes.c_double.from_buffer(mmap.mmap(descriptor, _BYTES))

    @classmethod
    def make(cls) -> Lease:
        """Creates a lease without an end, for an agent."""
        descriptor = os.memfd_create("moc-lease")
        os.truncate(descriptor, _BYTES)
        lease = cls(descriptor)
        lease.end = math.inf
        return lease

    @classmethod
    def of_this_worker(cls) -> Lease | None:
        """The lease of this process; None outside of a job of our launcher."""
        text = os.environ.get(environment.LEASE)
        return None if text is None else cls(int(text))

    @property
    def end(self) -> float:
        """Expiry time."""
        return self._end.value

    @end.setter
    def end(self, at: float) -> None:
        self._end.value = at

    @property
    def left(self) -> float:
        """Seconds until expiry; negative afterwards."""
        return self.end - time.monotonic()

    def enforce(self) -> None:
        """Kills this process if the lease has expired: another worker may have its place."""
        if self.left <= 0:
            who = f"worker {os.environ.get('RANK')}"
            why = "has heard of no controller for too long, and ends itself: another one may have its place"
            print_lines(f"mocrun: {who} {why}", error=True, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)  # as its agent would: the worker counts as lost, not as failed
