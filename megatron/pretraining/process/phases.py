"""Measures start-up time by phase, from the launch of the process to the first iteration."""

from __future__ import annotations

import time

import psutil


class Phases:
    """Stopwatch over named phases; the first starts with the process."""

    def __init__(self):
        self._last = psutil.Process().create_time()
        self.seconds: dict[str, float] = {}

    def done(self, name: str) -> None:
        """Ends the current phase and starts the next."""
        current_time = time.time()
        self.seconds[name] = round(current_time - self._last, 3)
        self._last = current_time
