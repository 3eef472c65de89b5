"""Implements backoff for operations whose failure must not end training: when to retry and when to warn."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from moc.errors import warning

_SILENCE_S = 60.0  # minimum between two warnings
_SHARE = 20.0  # minimum ratio of a pause to the duration of the attempt before it


class Trouble:
    """Backoff of a failing operation: retries after 1 s to 1 min, warnings every 1 min to 1 h, both doubling.

    An operation that alternately fails and works also causes at most one warning a minute.

    Attributes:
        count: failures in total.
        warned: a warning was due since the operation began to fail.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.count = 0
        self._since: float | None = None
        self._next_try, self._warned_at, self._next_warning = 0.0, -math.inf, -math.inf
        self._begins()

    def _begins(self) -> None:
        self.warned = False
        self._pause, self._silence = 1.0, _SILENCE_S

    def __bool__(self) -> bool:
        """Whether the operation is failing."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """Seconds since the first failure; 0 while the operation works."""
        return 0.0 if self._since is None else self._clock() - self._since

    @property
    def rests(self) -> bool:
        """Whether it is too early to retry."""
        return self._since is not None and self._clock() < self._next_try

    def failed(self, took_s: float = 0.0) -> bool:
        """Records a failed attempt, retried less often if it took long; returns whether a warning is due."""
        now = self._clock()
        self.count += 1
        if self._since is None:
            self._since = now
        self._next_try = now + max(self._pause, _SHARE * took_s)
        self._pause = min(2 * self._pause, 60.0)
        if now < self._next_warning:
            return False
        self._warned_at = now
        self._next_warning = now + self._silence
        self._silence = min(2 * self._silence, 3600.0)
        self.warned = True
        return True

    def over(self) -> float:
        """Records that the operation works again; returns the seconds since its first failure."""
        lasted, self._since = self.seconds, None
        self._next_warning = min(self._next_warning, self._warned_at + _SILENCE_S)
        self._begins()
        return lasted


_MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of a calculation; errors of files and communication have their own handlers."""


class Harmless:
    """Contexts for choices and reports: an error is printed, and does not end training.

    Args:
        say: prints a message.
        what: the failing calculation, as the subject of a sentence.
        effect: effect of the failure, as a clause.
    """

    def __init__(self, say: Callable[[str], None], what: str, effect: str):
        self._say, self._what, self._effect = say, what, effect
        self._trouble = Trouble()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Suppresses an error of the body; prints it at most once a minute."""
        try:
            yield
        except _MISTAKES as error:
            if self._trouble.failed():
                self._say(
                    warning(
                        f"{self._what} failed ({type(error).__name__}: {error}), and {self._effect}. Fix: report the "
                        "message as an issue",
                        code="calculation-failed",
                    )
                )
