"""Measures spans on the stream of a compute device, such as waits for other workers.

A GPU executes enqueued operations later, so the host cannot time how long a worker waits for another one.  Marks on the
stream, before and after the operation, show the duration and the time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

_MAX_SPANS = 1 << 14
"""Maximum number of spans kept until :meth:`StreamSpans.take`; a stream has fewer in between."""


class Mark(Protocol):
    """Position on the stream, as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Returns whether the stream has reached the mark."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Returns the milliseconds from here to a later mark, after the stream has reached both."""
        ...


Marker = Callable[[], Mark]
"""Function that puts a mark behind everything that the calling thread has enqueued."""


def marker_of(device: torch.device) -> Marker | None:
    """Returns the marker of a device; None on the CPU, where nothing is enqueued."""
    return functools.partial(_CudaMark, device) if device.type == "cuda" else None


class _CudaMark:
    """CUDA event on the current stream of a device, for any thread.

    Each thread has its own current device, at first device 0.  A query from a new thread would create a context there,
    which takes some hundred megabytes of that device's memory from each worker.
    """

    def __init__(self, device: torch.device):
        import torch  # imported here, so that programs report mistakes without this delay

        self._device, self._select = device, torch.cuda.device
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def query(self) -> bool:
        """See :class:`Mark`."""
        with self._select(self._device):
            return self._event.query()

    def elapsed_time(self, end_event: _CudaMark) -> float:
        """See :class:`Mark`."""
        with self._select(self._device):
            return self._event.elapsed_time(end_event._event)


class StreamSpans:
    """Spans of one kind on a stream, such as its waits for other workers; thread-safe."""

    def __init__(self, mark: Marker):
        self._mark = mark
        self._spans: deque[_Span] = deque(maxlen=_MAX_SPANS)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def span(self) -> Iterator[None]:
        """Context of a span: operations that the calling thread enqueues, or the time while it waits itself."""
        span = _Span(self._try_to_mark())
        with self._lock:
            self._spans.append(span)
        try:
            yield
        finally:
            span.end, span.is_enqueued = self._try_to_mark(), True

    @property
    def under_way(self) -> bool:
        """Whether the stream is within a span: all operations before it are done."""
        with self._lock:
            spans = [*self._spans]
        return any(span.has_begun and not span.over for span in spans)

    def take(self) -> float:
        """Returns the seconds of the spans that have ended since the last call."""
        seconds = 0.0
        with self._lock:
            while self._spans and self._spans[0].over:
                seconds += self._spans.popleft().seconds
        return seconds

    def clear(self) -> None:
        """Drops all spans, after an abort."""
        with self._lock:
            self._spans.clear()

    def _try_to_mark(self) -> Mark | None:
        try:
            return self._mark()
        except RuntimeError:  # broken device, which the next use of its results reports
            return None


class _Span:
    def __init__(self, begin: Mark | None):
        self.begin, self.is_enqueued = begin, False
        self.end: Mark | None = None

    @property
    def has_begun(self) -> bool:
        return self.begin is None or _reached(self.begin)

    @property
    def over(self) -> bool:
        return self.is_enqueued and (self.end is None or _reached(self.end))

    @property
    def seconds(self) -> float:
        try:
            return 0.0 if self.begin is None or self.end is None else self.begin.elapsed_time(self.end) / 1e3
        except RuntimeError:
            return 0.0


def _reached(mark: Mark) -> bool:
    try:
        return mark.query()
    except RuntimeError:
        return True
