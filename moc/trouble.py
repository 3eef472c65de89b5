"""Something that fails, or hangs, and must not end training: when to try it again, and when to say so."""

from __future__ import annotations

import time
from collections.abc import Callable

_SHARE = 20.0
"""A pause is so many times as long as the try before it."""


class Trouble:
    """Pauses between tries double from a second to a minute, those between warnings from a minute to an hour.

    Args:
        clock: seconds that only go up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.count = 0
        self._since: float | None = None
        self._next_try = self._next_warning = 0.0
        self._pause, self._silence = 1.0, 60.0

    def __bool__(self) -> bool:
        """Whether it lasts."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """For how long it has lasted."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def rests(self) -> bool:
        """Whether it is too early to try again."""
        return self._since is not None and self._clock() < self._next_try

    def failed(self, took_s: float = 0.0) -> bool:
        """It has failed, once more.

        Args:
            took_s: seconds that the try took: those that cost much are made less often.

        Returns:
            Whether that is to be said now.
        """
        now = self._clock()
        self.count += 1
        if self._since is None:
            self._since, self._next_warning = now, now
        self._next_try = now + max(self._pause, _SHARE * took_s)
        self._pause = min(2 * self._pause, 60.0)
        if now < self._next_warning:
            return False
        self._next_warning = now + self._silence
        self._silence = min(2 * self._silence, 3600.0)
        return True

    def over(self) -> float:
        """It works again; after how many seconds."""
        lasted, total = self.seconds, self.count
        self.__init__(self._clock)
        self.count = total
        return lasted
