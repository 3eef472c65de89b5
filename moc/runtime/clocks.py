"""Clocks of a job: the lease of a node's workers, and a clock that excludes the pauses of its process.

The lease is the time until which the workers may run, in memory shared with their agent.  The agent renews it whenever
the controller answers.  If the agent is stopped or disconnected, the lease expires.  Others may then take over the
workers' ranks, so these workers must commit nothing from then on.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import signal
import time

from moc.cli_output import print_lines
from moc.runtime import environment

_BYTES = 8


class Lease:
    """Expiry time, in seconds of the machine's monotonic clock; infinite if no other worker can take over the ranks.

    The descriptor of the shared memory stays open.
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._end = ctypes.c_double.from_buffer(mmap.mmap(descriptor, _BYTES))

    @classmethod
    def create(cls) -> Lease:
        """Creates a lease without an end, for an agent."""
        descriptor = os.memfd_create("moc-lease")
        os.truncate(descriptor, _BYTES)
        lease = cls(descriptor)
        lease.end = math.inf
        return lease

    @classmethod
    def from_environment(cls) -> Lease | None:
        """Returns the lease of this process; None outside a job of our launcher."""
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
    def remaining_s(self) -> float:
        """Seconds until expiry; negative afterwards."""
        return self.end - time.monotonic()

    def kill_if_expired(self) -> None:
        """Kills this process if the lease has expired, since another worker may have its rank."""
        if self.remaining_s <= 0:
            who = f"worker {os.environ.get('RANK')}"
            why = "has lost the controller for too long, and ends itself: another worker may have its rank"
            print_lines(f"mocrun: {who} {why}", error=True, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)  # as its agent would: the worker counts as lost, not as failed


class RunningClock:
    """Counts the seconds that this process ran, so that peers are not blamed for messages missed during its pauses.

    Args:
        max_step_s: maximum seconds between two ticks; any excess counts as a pause.

    Attributes:
        now: seconds that the process ran since construction.
    """

    def __init__(self, max_step_s: float):
        self.now, self._ticked_at, self._max_step_s = 0.0, time.monotonic(), max_step_s

    def tick(self) -> None:
        """Advances the clock by the time since the last call, without pauses; call it often."""
        now = time.monotonic()
        self.now += min(now - self._ticked_at, self._max_step_s)
        self._ticked_at = now
