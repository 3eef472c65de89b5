"""Copies in pipeline bubbles: a worker's waits for other stages (MoEtion, section 5.3, Algorithm 4)."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from statistics import median_low

import torch

from moc import stream
from moc.snapshot.capture import PIECE, Gate, Split
from moc.stream import Marker, StreamSpans

_PIECES = 256
"""Number of pieces that fit into an iteration's bubbles; a copy exceeds a wait by at most one piece."""

_LEAST_PIECE = 64 << 10
"""Bytes below which a check of the gate takes longer than the copy."""

_RECENT = 10

_LOOKS_S = 2e-4
"""Seconds between two checks of a device's stream."""


def split_of(amount: int, fitting: float | None) -> Split:
    """Divides a snapshot by Algorithm 4: copies that do not fit into bubbles run during computation.

    Args:
        amount: bytes of the snapshot.
        fitting: bytes that fit into an iteration's bubbles; None if unknown, and all may pass.
    """
    if fitting is None:
        return Split(beside=amount)
    return Split(beside=max(0, amount - int(fitting)), piece=int(min(PIECE, max(_LEAST_PIECE, fitting / _PIECES))))


def bubbles_on(device: torch.device) -> Bubbles:
    """Returns the bubbles of a worker with this device."""
    mark = stream.marker_of(device)
    return Bubbles() if mark is None else StreamBubbles(mark)


class Bubbles(Gate):
    """Gate that measures an iteration's waits for other workers, and lets copies pass in them first."""

    def __init__(self):
        super().__init__()
        self._waited_s = 0.0  # in this iteration
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._rates: deque[float] = deque(maxlen=_RECENT)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Context of an iteration's forward and backward: outside waits, the gate is closed."""
        self._waited_s = 0.0
        self.close()
        try:
            yield
        finally:
            self.open()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which this worker waits for another one."""
        before, begun = (self.is_open, self._waits), time.perf_counter()
        self._waits = True
        self.open()
        try:
            yield
        finally:
            was_open, self._waits = before
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
        """As :meth:`Gate.split`, with medians of the last iterations and snapshots."""
        known = self._seconds and self._rates
        return split_of(amount, median_low(self._seconds) * median_low(self._rates) if known else None)


class StreamBubbles(Bubbles):
    """Bubbles measured on a device's stream, because the host enqueues an iteration before the device computes it.

    Copies pass unless the stream is in a forward or backward without a wait.
    """

    def __init__(self, mark: Marker):
        super().__init__()
        self._computed, self._waited = StreamSpans(mark), StreamSpans(mark)

    @property
    def is_open(self) -> bool:
        """See :class:`Gate`."""
        return super().is_open or not self._computed.under_way or self._waited.under_way

    @property
    def waits(self) -> bool:
        """See :class:`Gate`."""
        return self._waited.under_way

    def wait(self) -> None:
        """See :class:`Gate`; checks regularly, since nothing wakes this thread when the stream reaches a wait."""
        while not self.is_open:
            self._is_open.wait(_LOOKS_S)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """See :class:`Bubbles`; when it returns, the stream may not have started."""
        self._computed.take()
        self._waited.take()
        self.close()
        try:
            with self._computed.span():
                yield
        except BaseException:
            self._computed.clear()
            self._waited.clear()
            self.open()
            raise

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """See :class:`Bubbles`."""
        with self._waited.span():
            yield

    def take(self) -> float:
        """See :class:`Bubbles`; to be called after the commit all-reduce, when the host has waited for the stream."""
        self._waited_s = self._waited.take()
        return super().take()
