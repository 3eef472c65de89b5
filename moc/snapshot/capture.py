"""Copies of live memory that run beside the computation, until the next update must wait for them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from moc.snapshot.copies import Copy, pieces

PIECE = 64 << 20
"""Bytes that are copied before the gate is asked again."""


class Gate:
    """Holds up copies between two pieces while it is closed; open at first, and used from any thread.

    Whoever closes it while an iteration is computed opens it again before the vote.
    """

    def __init__(self):
        self._is_open = threading.Event()
        self.open()

    def open(self) -> None:
        """Lets copies pass from now on."""
        self._is_open.set()

    def close(self) -> None:
        """Lets no further piece pass; the one that is being copied is finished."""
        self._is_open.clear()

    def wait(self) -> None:
        """Returns when it is open."""
        self._is_open.wait()


class Capture(ABC):
    """Copies that are under way."""

    @abstractmethod
    def wait(self, opens: bool = True) -> None:
        """Returns when all is copied; may be called from any thread, and again.

        Args:
            opens: something cannot go on before that, so the gate is opened; if not, it is left as it is.
        """

    @property
    @abstractmethod
    def seconds(self) -> float:
        """How long the copies took, without waits for the gate; to be asked after :meth:`wait`."""


class Capturer(ABC):
    """Starts copies; at most a few are under way, and they run in the order in which they were started."""

    @abstractmethod
    def start(self, copies: Sequence[Copy]) -> Capture:
        """Begins to copy what the sources hold now, and returns at once; they must not change meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """Returns when nothing is copied any more; nothing may be started after it."""


def capturer(device: torch.device, gate: Gate | None = None) -> Capturer:
    """The one for a device; see :class:`ThreadCapturer` for the gate."""
    return StreamCapturer(device) if device.type == "cuda" else ThreadCapturer(gate)


class ThreadCapturer(Capturer):
    """On the CPU: a thread beside the one that computes; torch copies without holding the interpreter's lock.

    Args:
        gate: what copies have to pass, piece by piece; by default there is none, and they are done in one call.
    """

    def __init__(self, gate: Gate | None = None):
        self._gate = gate
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-capture")

    def start(self, copies: Sequence[Copy]) -> Capture:
        """See :class:`Capturer`."""
        return _ThreadCapture(self._thread.submit(_copy, copies, self._gate), self._gate)

    def close(self) -> None:
        """See :class:`Capturer`; the gate is opened."""
        if self._gate is not None:
            self._gate.open()
        self._thread.shutdown(wait=True, cancel_futures=True)


class _ThreadCapture(Capture):
    def __init__(self, done: Future, gate: Gate | None):
        self._done, self._gate = done, gate

    def wait(self, opens: bool = True) -> None:
        if opens and self._gate is not None:
            self._gate.open()
        self._done.result()

    @property
    def seconds(self) -> float:
        return self._done.result()


def _copy(copies: Sequence[Copy], gate: Gate | None) -> float:
    seconds = 0.0
    with torch.no_grad():
        for piece in _passing(copies, gate):
            begun = time.perf_counter()
            _copy_all(piece, non_blocking=False)
            seconds += time.perf_counter() - begun
    return seconds


def _passing(copies: Sequence[Copy], gate: Gate | None) -> Iterator[Sequence[Copy]]:
    if gate is None:
        yield copies
        return
    for piece in pieces(copies, PIECE):
        gate.wait()
        yield piece


def _copy_all(copies: Sequence[Copy], non_blocking: bool) -> None:
    # in one call, so that the interpreter is not needed in between
    if copies:
        targets, sources = [copy.target for copy in copies], [copy.source for copy in copies]
        torch._foreach_copy_(targets, sources, non_blocking)  # pyright: ignore[reportPrivateImportUsage]  # no public one


class StreamCapturer(Capturer):
    """On CUDA: a stream of its own, into pinned memory; the copy engine works while kernels run.

    There is no gate: the host runs ahead of the copies, so that only events of the stream could hold them up in time.
    """

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

    def wait(self, opens: bool = True) -> None:
        self._end.synchronize()

    @property
    def seconds(self) -> float:
        return self._begin.elapsed_time(self._end) / 1000
