"""Measures the silence of peers with a clock that excludes this process's own pauses."""

from __future__ import annotations

import time


class RunningClock:
    """Counts the seconds in which this process ran, so that peers are not blamed for messages missed during its pauses.

    Args:
        most_s: maximum seconds between two ticks; any excess counts as a pause.

    Attributes:
        now: seconds that the process ran since construction.
    """

    def __init__(self, most_s: float):
        self.now, self._at, self._most_s = 0.0, time.monotonic(), most_s

    def tick(self) -> None:
        """Advances the clock by the time since the last call, without pauses; call it often."""
        now = time.monotonic()
        self.now += min(now - self._at, self._most_s)
        self._at = now
