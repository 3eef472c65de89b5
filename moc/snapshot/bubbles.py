"""Copies in a pipeline's bubbles, the waits of a worker for other stages (MoEtion, section 5.3, Algorithm 4)."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from statistics import median_low

from moc.snapshot.capture import PIECE, Gate, Split

_PIECES = 256
"""Pieces that the bubbles of an iteration have time for: each wait, however short, is overrun by one at most."""

_LEAST_PIECE = 64 << 10
"""Bytes below which a check of the gate takes longer than the copy."""

_RECENT = 10


def split_of(amount: int, fitting: float | None) -> Split:
    """Algorithm 4: copies that the bubbles have no time for pass beside the computation, the rest in the bubbles.

    Args:
        amount: bytes of the snapshot.
        fitting: bytes that the bubbles of an iteration have time for; None if unknown, and all pass.
    """
    if fitting is None:
        return Split(beside=amount)
    return Split(beside=max(0, amount - int(fitting)), piece=int(min(PIECE, max(_LEAST_PIECE, fitting / _PIECES))))


class Bubbles(Gate):
    """Times an iteration's waits for other workers, and lets copies pass in them first."""

    def __init__(self):
        super().__init__()
        self._waited_s = 0.0  # in this iteration
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._rates: deque[float] = deque(maxlen=_RECENT)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Context of an iteration's forward and backward: outside of waits, the gate is closed."""
        self._waited_s = 0.0
        self.close()
        try:
            yield
        finally:
            self.open()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which this worker waits for another one."""
        before, begun = (self.is_open, self.waits), time.perf_counter()
        self.waits = True
        self.open()
        try:
            yield
        finally:
            was_open, self.waits = before
            if not was_open:
                self.close()
            self._waited_s += time.perf_counter() - begun

    def take(self) -> float:
        """Records a completed iteration; returns the seconds of its waits."""
        waited_s, self._waited_s = self._waited_s, 0.0
        self._seconds.append(waited_s)
        return waited_s

    def copied(self, amount: int, seconds: float) -> None:
        """As :meth:`Gate.copied`."""
        if amount and seconds:
            self._rates.append(amount / seconds)

    def split(self, amount: int) -> Split:
        """As :meth:`Gate.split`: by medians of the last iterations and snapshots."""
        known = self._seconds and self._rates
        return split_of(amount, median_low(self._seconds) * median_low(self._rates) if known else None)
