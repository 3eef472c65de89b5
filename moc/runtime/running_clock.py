"""The clock by which a process judges the silence of others."""

from __future__ import annotations

import time


class RunningClock:
    """Counts the seconds in which this process ran: after a pause, others are not judged for what it did not hear.

    Args:
        most_s: between two ticks; what is longer was a pause.

    Attributes:
        now: seconds since it was made.
    """

    def __init__(self, most_s: float):
        self.now, self._at, self._most_s = 0.0, time.monotonic(), most_s

    def tick(self) -> None:
        """Called often; of the time since the last call, a pause does not count."""
        now = time.monotonic()
        self.now += min(now - self._at, self._most_s)
        self._at = now
