"""Records progress of the compute thread: its section, the time in it, and whether it waits for other workers.

progress("step")        # enters this section, and completes the previous one
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moc import stream
from moc.stream import StreamSpans

if TYPE_CHECKING:
    import torch


class Progress:
    """Progress of the compute thread, which writes it; another thread reads it."""

    def __init__(self):
        self._at: tuple[str | None, float] = None, time.monotonic()
        self._longest: dict[str, float] = {}
        self._waits, self._waited_s = False, 0.0
        self._iteration: int | None = None
        self._unreported = threading.Event()
        self._on_stream: StreamSpans | None = None
        self._lock = threading.Lock()

    @property
    def iteration(self) -> int | None:
        """The newest iteration that this process has completed or resumed from."""
        return self._iteration

    def completed(self, iteration: int) -> None:
        """Records an iteration that this process has completed or resumed from, and ends the wait for its report."""
        self._iteration = iteration
        self._unreported.set()

    def wait_for_report(self, timeout: float) -> None:
        """Waits until there is an iteration to report, at most for ``timeout`` seconds."""
        self._unreported.wait(timeout)

    def use(self, device: torch.device) -> None:
        """Also counts waits of this device's stream."""
        mark = stream.marker_of(device)
        self._on_stream = None if mark is None else StreamSpans(mark)

    def enter(self, section: str) -> None:
        """Enters a section, possibly the same one; completes the previous one and records its duration."""
        before, since = self._at
        self._begin(section)
        if before is not None:
            self._longest[before] = max(self._longest.get(before, 0.0), self._at[1] - since)

    def forget(self, section: str | None = None) -> None:
        """Discards an interrupted section's duration, and enters the given section, if any."""
        if self._on_stream is not None:
            self._on_stream.clear()
        self._begin(section)

    def _begin(self, section: str | None) -> None:
        with self._lock:
            self._waited_on_stream()
            self._at, self._waited_s = (section, time.monotonic()), 0.0

    @contextlib.contextmanager
    def waiting(self, on_stream: bool = False) -> Iterator[None]:
        """Marks the thread as waiting for other workers within the block.

        Args:
            on_stream: the block enqueues an operation in which the device's stream waits.
        """
        begun = time.monotonic()
        self._waits = True
        try:
            with self._on_stream.span() if on_stream and self._on_stream is not None else contextlib.nullcontext():
                yield
        finally:
            self._waits = False
            with self._lock:
                self._waited_s += time.monotonic() - begun

    def report(self) -> dict:
        """Returns the state of the thread.

        Returns:
            ``section`` (None for none); ``since``, seconds in it without completed waits; ``waits``, whether it or the
            device's stream waits for other workers; ``longest``, seconds by section; and ``iteration``.
        """
        self._unreported.clear()
        with self._lock:
            waits = self._waits or (self._on_stream is not None and self._on_stream.under_way)
            self._waited_s += self._waited_on_stream()
            section, since = self._at
            seconds = max(0.0, time.monotonic() - since - self._waited_s)
        longest = dict(self._longest)
        return dict(section=section, since=seconds, waits=waits, longest=longest, iteration=self.iteration)

    def _waited_on_stream(self) -> float:
        return 0.0 if self._on_stream is None else self._on_stream.take()


PROGRESS = Progress()
"""Progress of this process, which has one compute thread."""

progress = PROGRESS.enter
