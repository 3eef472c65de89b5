"""Copies of live memory that run beside the computation; the next update waits for them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from moc.snapshot.copies import Copy, nbytes, pieces

PIECE = 64 << 20
"""Largest number of bytes copied between two checks of the gate."""


@dataclass(frozen=True)
class Split:
    """How copies pass a gate.

    Attributes:
        beside: bytes that pass although it is closed, beside the computation.
        piece: bytes copied between two checks of the gate.
    """

    beside: int = 0
    piece: int = PIECE


class Gate:
    """Holds up copies between two pieces while it is closed; initially open, and thread-safe.

    If it is closed during an iteration, it must be opened again before the vote.

    Attributes:
        waits: whether it is open because this worker waits for another one; by default, nobody tells.
        passed: bytes that have passed meanwhile.
    """

    waits = False

    def __init__(self):
        self._is_open = threading.Event()
        self.passed = 0
        self.open()

    @property
    def is_open(self) -> bool:
        """Whether copies pass."""
        return self._is_open.is_set()

    def open(self) -> None:
        """Lets copies pass from now on."""
        self._is_open.set()

    def close(self) -> None:
        """Lets no further piece pass; the current one completes."""
        self._is_open.clear()

    def wait(self) -> None:
        """Returns once the gate is open."""
        self._is_open.wait()

    def split(self, amount: int) -> Split:
        """How a snapshot of so many bytes passes; by default, nothing does while the gate is closed."""
        return Split(piece=PIECE)

    def copied(self, amount: int, seconds: float) -> None:
        """Receives bytes and time of a snapshot that has passed."""

    def passing(self, copies: Sequence[Copy]) -> Iterator[list[Copy]]:
        """Yields copies piece by piece, each when it may pass."""
        split = self.split(nbytes(copies))
        beside = split.beside
        for piece in pieces(copies, split.piece):
            amount = nbytes(piece)
            if beside > 0 and not self.is_open:
                beside -= amount
            else:
                self.wait()
                self.passed += amount if self.waits else 0
            yield piece


class Capture(ABC):
    """Copies in progress."""

    @abstractmethod
    def wait(self, opens: bool = True) -> None:
        """Returns once everything is copied; may be called from any thread, and repeatedly.

        It opens the gate, since the caller cannot continue before that; without ``opens``, the gate stays as it is.
        """

    @property
    @abstractmethod
    def seconds(self) -> float:
        """Time that the copies took, without waits for the gate; valid after :meth:`wait`."""

    @property
    def bubble_bytes(self) -> int:
        """Bytes copied while this worker waited for another one; 0 without a gate, valid after :meth:`wait`."""
        return 0


class Captures(Capture):
    """Several captures as one."""

    def __init__(self, parts: Sequence[Capture]):
        self._parts = parts

    def wait(self, opens: bool = True) -> None:
        """See :class:`Capture`."""
        for part in self._parts:
            part.wait(opens)

    @property
    def seconds(self) -> float:
        """See :class:`Capture`."""
        return sum(part.seconds for part in self._parts)

    @property
    def bubble_bytes(self) -> int:
        """See :class:`Capture`."""
        return sum(part.bubble_bytes for part in self._parts)


class Capturer(ABC):
    """Starts copies; at most a few are in progress, and they run in the order in which they were started."""

    @abstractmethod
    def start(self, copies: Sequence[Copy]) -> Capture:
        """Starts to copy what the sources hold now, and returns at once; they must not change meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """Returns once no copy is in progress; nothing may be started afterwards."""


def capturer(device: torch.device, gate: Gate | None = None) -> Capturer:
    """Returns the capturer for a device; see :class:`ThreadCapturer` for the gate."""
    return Both(StreamCapturer(device), ThreadCapturer()) if device.type == "cuda" else ThreadCapturer(gate)


class Both(Capturer):
    """Captures what is on a device by one capturer, and what is in host memory (offload) by another."""

    def __init__(self, device: Capturer, host: Capturer):
        self._device, self._host = device, host

    def start(self, copies: Sequence[Copy]) -> Capture:
        """See :class:`Capturer`."""
        host = [copy for copy in copies if copy.source.device.type == "cpu"]
        if not host:
            return self._device.start(copies)
        device = [copy for copy in copies if copy.source.device.type != "cpu"]
        started = [self._host.start(host)]
        return Captures([*started, self._device.start(device)] if device else started)

    def close(self) -> None:
        """See :class:`Capturer`."""
        self._device.close()
        self._host.close()


class ThreadCapturer(Capturer):
    """Captures on the CPU: a thread beside the computation; torch copies without holding the GIL.

    Args:
        gate: passed by copies piece by piece; by default there is none, and all copies are made in one call.
    """

    def __init__(self, gate: Gate | None = None):
        self._gate = gate
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-capture")

    def start(self, copies: Sequence[Copy]) -> Capture:
        """See :class:`Capturer`."""
        return _ThreadCapture(self._thread.submit(_passed, copies, self._gate), self._gate)

    def close(self) -> None:
        """See :class:`Capturer`; opens the gate."""
        if self._gate is not None:
            self._gate.open()
        self._thread.shutdown(wait=True, cancel_futures=True)


class _ThreadCapture(Capture):
    def __init__(self, done: Future[_Passed], gate: Gate | None):
        self._done, self._gate = done, gate

    def wait(self, opens: bool = True) -> None:
        if opens and self._gate is not None:
            self._gate.open()
        self._done.result()

    @property
    def seconds(self) -> float:
        return self._done.result().seconds

    @property
    def bubble_bytes(self) -> int:
        return self._done.result().bubble_bytes


class _Passed(NamedTuple):
    seconds: float
    bubble_bytes: int


def _passed(copies: Sequence[Copy], gate: Gate | None) -> _Passed:
    if gate is None:
        return _Passed(_copy(copies, None), 0)
    before = gate.passed
    seconds = _copy(copies, gate)
    gate.copied(nbytes(copies), seconds)
    return _Passed(seconds, gate.passed - before)


def _copy(copies: Sequence[Copy], gate: Gate | None) -> float:
    seconds = 0.0
    with torch.no_grad():
        for piece in [copies] if gate is None else gate.passing(copies):
            begun = time.perf_counter()
            _copy_all(piece, non_blocking=False)
            seconds += time.perf_counter() - begun
    return seconds


def _copy_all(copies: Sequence[Copy], non_blocking: bool) -> None:
    # one call, so that the GIL is not needed in between
    if copies:
        targets, sources = [copy.target for copy in copies], [copy.source for copy in copies]
        torch._foreach_copy_(targets, sources, non_blocking)  # pyright: ignore[reportPrivateImportUsage]  # no public one


class StreamCapturer(Capturer):
    """Captures on CUDA: a separate stream into pinned memory; the copy engine works while kernels run.

    There is no gate: the host runs ahead of the copies, so only stream events could hold them up in time.
    """

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)

    def start(self, copies: Sequence[Copy]) -> Capture:
        """See :class:`Capturer`; the copies start after the work queued on the current stream so far."""
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
