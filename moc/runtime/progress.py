"""What the thread that computes is at: which section, since when, and whether it waits for others.

progress("step")        # this is where it is from now on; and what it was in before is done
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Progress:
    """Written by the thread that computes, read by another."""

    def __init__(self):
        self._at: tuple[str | None, float] = None, time.monotonic()
        self._longest: dict[str, float] = {}
        self._waits = False

    def enter(self, section: str) -> None:
        """Begins a section, or the same one once more; the one before is done, and its time counts as measured."""
        before, since = self._at
        self._at = section, time.monotonic()
        if before is not None:
            self._longest[before] = max(self._longest.get(before, 0.0), self._at[1] - since)

    def forget(self, section: str | None = None) -> None:
        """What it was in was cut off: its time says nothing.  From now on it is in a section, or in none."""
        self._at = section, time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside of it, the thread waits for other workers."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def report(self) -> dict:
        """``section`` (None for none), ``since`` (seconds in it), ``waits``, and ``longest`` (seconds, by section)."""
        section, since = self._at
        longest = dict(self._longest)
        return dict(section=section, since=time.monotonic() - since, waits=self._waits, longest=longest)


PROGRESS = Progress()
"""Of this process: it has one thread that computes."""

progress = PROGRESS.enter
