"""Progress of the compute thread: its section, since when, and whether it waits for others.

progress("step")        # enters this section, and completes the previous one
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Progress:
    """Written by the compute thread, read by another."""

    def __init__(self):
        self._at: tuple[str | None, float] = None, time.monotonic()
        self._longest: dict[str, float] = {}
        self._waits = False
        self.iteration: int | None = None  # completed by this process, or that it resumed from

    def enter(self, section: str) -> None:
        """Enters a section, possibly the same again; the previous one is complete, and its duration is recorded."""
        before, since = self._at
        self._at = section, time.monotonic()
        if before is not None:
            self._longest[before] = max(self._longest.get(before, 0.0), self._at[1] - since)

    def forget(self, section: str | None = None) -> None:
        """Discards an interrupted section's duration, and enters the given section or none."""
        self._at = section, time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Marks the thread as waiting for other workers within the block."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def report(self) -> dict:
        """Reports ``section`` (None for none), ``since`` (seconds in it), ``waits``, ``longest`` and ``iteration``.

        ``longest`` has seconds by section.
        """
        section, since = self._at
        longest = dict(self._longest)
        since_s = time.monotonic() - since
        return dict(section=section, since=since_s, waits=self._waits, longest=longest, iteration=self.iteration)


PROGRESS = Progress()
"""Progress of this process, which has one compute thread."""

progress = PROGRESS.enter
