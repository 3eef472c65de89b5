"""Copies of live memory that run beside the computation, until the next update must wait for them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moc.snapshot.copies import Copy


class Capture(ABC):
    """Copies that are under way."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when all is copied; may be called from any thread, and again."""

    @property
    @abstractmethod
    def seconds(self) -> float:
        """How long the copies took; to be asked after :meth:`wait`."""


class Capturer(ABC):
    """Starts copies; at most a few are under way, and they run in the order in which they were started."""

    @abstractmethod
    def start(self, copies: Sequence[Copy]) -> Capture:
        """Begins to copy what the sources hold now, and returns at once; they must not change meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """Returns when nothing is copied any more; nothing may be started after it."""


def capturer(device: torch.device) -> Capturer:
    """The one for a device."""
    return StreamCapturer(device) if device.type == "cuda" else ThreadCapturer()


class ThreadCapturer(Capturer):
    """On the CPU: a thread beside the one that computes; torch copies without holding the interpreter's lock."""

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-capture")

    def start(self, copies: Sequence[Copy]) -> Capture:
        """See :class:`Capturer`."""
        return _ThreadCapture(self._thread.submit(_copy, copies))

    def close(self) -> None:
        """See :class:`Capturer`."""
        self._thread.shutdown(wait=True, cancel_futures=True)


class _ThreadCapture(Capture):
    def __init__(self, done: Future):
        self._done = done

    def wait(self) -> None:
        self._done.result()

    @property
    def seconds(self) -> float:
        return self._done.result()


def _copy(copies: Sequence[Copy]) -> float:
    begun = time.perf_counter()
    with torch.no_grad():
        _copy_all(copies, non_blocking=False)
    return time.perf_counter() - begun


def _copy_all(copies: Sequence[Copy], non_blocking: bool) -> None:
    # in one call, so that the interpreter is not needed in between
    if copies:
        targets, sources = [copy.target for copy in copies], [copy.source for copy in copies]
        torch._foreach_copy_(targets, sources, non_blocking)  # pyright: ignore[reportPrivateImportUsage]  # no public one


class StreamCapturer(Capturer):
    """On CUDA: a stream of its own, into pinned memory; the copy engine works while kernels run."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def start(self, copies: Sequence[Copy]) -> Capture:
        """See :class:`Capturer`; the copies begin when what was asked of the current stream so far is done."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self._stream):
            begin.record()
            _copy_all(copies, non_blocking=True)
            end.record()
        return _StreamCapture(begin, end)

    def close(self) -> None:
        """See :class:`Capturer`."""
        self._stream.synchronize()


class _StreamCapture(Capture):
    def __init__(self, begin: torch.cuda.Event, end: torch.cuda.Event):
        self._begin, self._end = begin, end

    def wait(self) -> None:
        self._end.synchronize()

    @property
    def seconds(self) -> float:
        return self._begin.elapsed_time(self._end) / 1000
