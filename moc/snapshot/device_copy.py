"""Copies live memory during computation, in bubbles of the pipeline if possible; the next update waits for it."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median_low
from typing import Any, NamedTuple

import torch

from moc import stream
from moc.stream import Marker, StreamSpans


@dataclass(frozen=True, eq=False)
class Copy:
    """One contiguous piece: flat tensors of equal length and dtype, from live memory to host memory."""

    source: torch.Tensor
    target: torch.Tensor


def nbytes(copies: Iterable[Copy]) -> int:
    """Returns the bytes of all copies."""
    return sum(copy.source.nbytes for copy in copies)


def coalesced(
    sources: Iterable[torch.Tensor], spans: Iterable[tuple[int, int]]
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Joins data that is adjacent in live memory and in the file, such as the boxes of a ZeRO range.

    Args:
        sources: flat tensors.
        spans: bytes [start, stop) of the file for each source.
    """
    first, begin, end, next_address = None, 0, 0, 0  # next_address: after the run at [begin, end) of the file
    for source, (start, stop) in zip(sources, spans, strict=True):
        if start == stop:
            continue
        address = source.data_ptr()
        if first is not None:
            if address == next_address and start == end and _share_storage(first, source):
                end, next_address = stop, address + stop - start
                continue
            yield _extended(first, end - begin), begin, end
        first, begin, end, next_address = source, start, stop, address + stop - start
    if first is not None:
        yield _extended(first, end - begin), begin, end


def _share_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether one view of a storage can cover both."""
    return first.dtype == second.dtype and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def _extended(first: torch.Tensor, nbytes: int) -> torch.Tensor:
    return first if first.nbytes == nbytes else first.as_strided((nbytes // first.itemsize,), (1,))


def cut_copies(copies: Iterable[Copy], max_nbytes: int) -> Iterator[list[Copy]]:
    """Cuts copies, in order, into pieces of at most ``max_nbytes`` bytes, at least the size of an element."""
    piece, remaining = [], max_nbytes
    for copy in copies:
        start, stop, width = 0, copy.source.numel(), copy.source.itemsize
        while start < stop:
            end = min(stop, start + remaining // width)
            if end > start:
                is_complete = end - start == stop
                piece.append(copy if is_complete else Copy(copy.source[start:end], copy.target[start:end]))
                start, remaining = end, remaining - (end - start) * width
            if start < stop:
                yield piece
                piece, remaining = [], max_nbytes
    if piece:
        yield piece


PIECE = 64 << 20
"""Maximum number of bytes copied between two checks of the gate."""

DEVICE_PIECE = 16 << 20
"""As :data:`PIECE`, on CUDA, where copies of one direction run in turn. megatron-core's MoE layers copy each expert's
number of tokens to the host before they dispatch. With this limit such a layer waits for at most one piece, not for the
complete snapshot. A piece takes a third of a millisecond over PCIe 5."""


HOST_PIECE = 4 << 20
"""As :data:`PIECE`, for copies of host memory without a gate: a waiting caller copies the next piece."""


@dataclass(frozen=True)
class GateSplit:
    """Division of copies at a gate.

    Attributes:
        bytes_while_closed: bytes that pass during computation, although the gate is closed.
        piece: bytes copied between two checks of the gate.
    """

    bytes_while_closed: int = 0
    piece: int = PIECE


class Gate:
    """Stops copies between two pieces while it is closed; initially open, and thread-safe.

    If it is closed during an iteration, it must be opened again before the commit all-reduce.

    Args:
        piece: bytes copied between two checks of the gate; None for :data:`PIECE`.

    Attributes:
        passed: bytes that passed while this worker waited for another one.
    """

    def __init__(self, piece: int | None = None):
        self._is_open, self._piece, self._waits = threading.Event(), piece, False
        self.passed = 0
        self.open()

    @property
    def waits(self) -> bool:
        """Whether it is open because this worker waits for another one; by default, it never does."""
        return self._waits

    @property
    def is_open(self) -> bool:
        """Whether copies pass."""
        return self._is_open.is_set()

    def open(self) -> None:
        """Opens the gate: copies pass from now on."""
        self._is_open.set()

    def close(self) -> None:
        """Closes the gate: no further piece passes, and the current one completes."""
        self._is_open.clear()

    def wait(self) -> None:
        """Returns once the gate is open."""
        self._is_open.wait()

    def split(self, amount: int) -> GateSplit:
        """Returns the division of ``amount`` bytes of a snapshot; by default, none pass while the gate is closed."""
        return GateSplit(piece=self._piece or PIECE)

    def copied(self, amount: int, seconds: float) -> None:
        """Receives bytes and time of a snapshot that has passed."""

    def passing(self, copies: Sequence[Copy]) -> Iterator[list[Copy]]:
        """Yields copies piece by piece, each when it may pass."""
        split = self.split(nbytes(copies))
        bytes_while_closed = split.bytes_while_closed
        for piece in cut_copies(copies, split.piece):
            amount = nbytes(piece)
            if bytes_while_closed > 0 and not self.is_open:
                bytes_while_closed -= amount
            else:
                self.wait()
                self.passed += amount if self.waits else 0
            yield piece


class Capture(ABC):
    """Copies in progress."""

    @abstractmethod
    def wait(self, opens: bool = True) -> None:
        """Returns once everything is copied; may be called from any thread, and repeatedly.

        By default it opens the gate and helps to copy, since the caller cannot continue earlier. Without ``opens``, it
        only waits.
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
        for part in self._parts:
            part.wait(opens)

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self._parts)

    @property
    def bubble_bytes(self) -> int:
        return sum(part.bubble_bytes for part in self._parts)


class Capturer(ABC):
    """Starts copies; at most a few are in progress, and they run in the order of their start."""

    @abstractmethod
    def start(self, copies: Sequence[Copy]) -> Capture:
        """Starts to copy the current values of the sources without waiting; they must not change until copied."""

    @abstractmethod
    def close(self) -> None:
        """Returns once no copy is in progress; nothing may be started afterwards."""


def capturer(device: torch.device, gate: Gate | None = None, check: Callable[[], None] = lambda: None) -> Capturer:
    """Returns the capturer for a device.

    Args:
        device: of the live memory.
        gate: see :class:`ThreadCapturer`; on CUDA there is always one, open by default.
        check: on CUDA, raises if the device's work so far cannot be trusted. Called by another thread, after the device
            has finished this work and before the copy.
    """
    if device.type != "cuda":
        return ThreadCapturer(gate)
    return Both(ThreadCapturer(gate or Gate(DEVICE_PIECE), FromDevice(device, check)), ThreadCapturer())


class Both(Capturer):
    """Captures device memory with one capturer, and host memory (offload) with another."""

    def __init__(self, device: Capturer, host: Capturer):
        self._device, self._host = device, host

    def start(self, copies: Sequence[Copy]) -> Capture:
        host = [copy for copy in copies if copy.source.device.type == "cpu"]
        if not host:
            return self._device.start(copies)
        device = [copy for copy in copies if copy.source.device.type != "cpu"]
        started = [self._host.start(host)]
        return Captures([*started, self._device.start(device)] if device else started)

    def close(self) -> None:
        self._device.close()
        self._host.close()


class FromHost:
    """Copies host memory for the thread; torch copies without holding the GIL."""

    def enter(self) -> None:
        """Prepares the copying thread; to be called once on it."""

    def mark(self) -> Any:
        """Returns a marker of the calling thread's device work so far."""

    def reach(self, mark: Any) -> None:
        """Returns once the marked work is done."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Returns once everything is copied."""
        _copy_all(copies, non_blocking=False)


class FromDevice(FromHost):
    """Copies CUDA memory to pinned memory for the thread, on a separate stream, in parallel with other kernels.

    The training thread only records an event. The copying thread makes all other CUDA calls and sleeps while it waits.

    Args:
        device: of the sources.
        check: as in :func:`capturer`.
    """

    def __init__(self, device: torch.device, check: Callable[[], None]):
        self._device, self._check = device, check
        self._stream: torch.cuda.Stream | None = None

    def enter(self) -> None:
        torch.cuda.set_device(self._device)  # per thread; otherwise the first call creates a context on device 0
        self._stream = torch.cuda.Stream(self._device)

    def mark(self) -> torch.cuda.Event:
        """See :class:`FromHost`: kernels on the current stream."""
        event = torch.cuda.Event(blocking=True)  # otherwise a waiting thread occupies a core
        event.record()
        return event

    def reach(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()
        self._check()

    def copy(self, copies: Sequence[Copy]) -> None:
        assert self._stream is not None  # enter() was called
        event = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            _copy_all(copies, non_blocking=True)
            event.record()
        event.synchronize()


class ThreadCapturer(Capturer):
    """Captures in a background thread.

    Args:
        gate: controls each piece; without one, the copies are of host memory, and waiting callers help.
        copier: copies for the thread, after the gate.

    Raises:
        ValueError: ``copier`` is given without a gate.
    """

    def __init__(self, gate: Gate | None = None, copier: FromHost | None = None):
        if gate is None and copier is not None:
            raise ValueError("copies that are not of host memory pass a gate: give one")
        self._gate, self._copier = gate, copier or FromHost()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-capture", initializer=self._copier.enter)
        self._last: Future | None = None

    def start(self, copies: Sequence[Copy]) -> Capture:
        """See :class:`Capturer`: copies the sources as they are after the device's work so far."""
        if self._gate is None:
            capture = _HostCapture(copies, self._thread, self._last)
            self._last = capture.done
            return capture
        passed = self._thread.submit(_passed, copies, self._gate, self._copier, self._copier.mark())
        return _ThreadCapture(passed, self._gate)

    def close(self) -> None:
        """See :class:`Capturer`; opens the gate."""
        if self._gate is not None:
            self._gate.open()
        self._thread.shutdown(wait=True, cancel_futures=True)


class _ThreadCapture(Capture):
    def __init__(self, passed: Future[_Passed], gate: Gate):
        self._done, self._gate = passed, gate

    def wait(self, opens: bool = True) -> None:
        if opens:
            self._gate.open()
        self._done.result()

    @property
    def seconds(self) -> float:
        return self._done.result().seconds

    @property
    def bubble_bytes(self) -> int:
        return self._done.result().bubble_bytes


class _HostCapture(Capture):
    """Copies of host memory by the thread and by waiting callers, each taking the next piece in turn.

    Args:
        copies: all of them.
        thread: makes them after the copies that were started before.
        last: done when the thread has no earlier copies left to start; None if there are none.

    Attributes:
        done: when the thread has nothing left to start.
    """

    def __init__(self, copies: Sequence[Copy], thread: ThreadPoolExecutor, last: Future | None):
        self._pieces, self._taking = cut_copies(copies, HOST_PIECE), threading.Lock()
        self._in_progress, self._seconds, self._failure = 0, 0.0, None
        self._over, self._last = threading.Event(), last
        self.done = thread.submit(self._make)

    def wait(self, opens: bool = True) -> None:
        if opens and (self._last is None or self._last.done()):
            self._make()
        self.done.result()
        self._over.wait()  # for pieces that other threads copy
        if self._failure is not None:
            raise self._failure

    @property
    def seconds(self) -> float:
        self.wait(opens=False)
        return self._seconds

    def _make(self) -> None:
        """Makes copies until all have been started."""
        try:
            with torch.no_grad():
                while (piece := self._take()) is not None:
                    self._copy(piece)
        finally:
            with self._taking:
                if self._in_progress == 0:
                    self._over.set()

    def _copy(self, piece: list[Copy]) -> None:
        started_at = time.perf_counter()
        try:
            _copy_all(piece, non_blocking=False)
        except BaseException as error:
            self._failure = error  # other threads may wait for this piece
            raise
        finally:
            with self._taking:
                self._seconds += time.perf_counter() - started_at
                self._in_progress -= 1

    def _take(self) -> list[Copy] | None:
        with self._taking:
            piece = next(self._pieces, None)
            self._in_progress += piece is not None
            return piece


class _Passed(NamedTuple):
    seconds: float
    bubble_bytes: int


def _passed(copies: Sequence[Copy], gate: Gate, copier: FromHost, mark: Any) -> _Passed:
    copier.reach(mark)
    before, seconds = gate.passed, 0.0
    with torch.no_grad():
        for piece in gate.passing(copies):
            started_at = time.perf_counter()
            copier.copy(piece)
            seconds += time.perf_counter() - started_at
    gate.copied(nbytes(copies), seconds)
    return _Passed(seconds, gate.passed - before)


def _copy_all(copies: Sequence[Copy], non_blocking: bool) -> None:
    # one call, so that the GIL is not needed between copies
    if copies:
        targets, sources = [copy.target for copy in copies], [copy.source for copy in copies]
        torch._foreach_copy_(targets, sources, non_blocking)  # pyright: ignore[reportPrivateImportUsage]  # no public one


_PIECES = 256
"""Number of pieces that fit into an iteration's bubbles; a copy exceeds a wait by at most one piece."""

_LEAST_PIECE = 64 << 10
"""Bytes below which a check of the gate takes longer than the copy."""

_RECENT = 10

_LOOKS_S = 2e-4
"""Seconds between two checks of a device's stream."""


def split_of(amount: int, fitting: float | None) -> GateSplit:
    """Divides a snapshot by Algorithm 4: copies that do not fit into bubbles run during computation.

    Args:
        amount: bytes of the snapshot.
        fitting: bytes that fit into an iteration's bubbles; None if unknown, and all may pass.
    """
    if fitting is None:
        return GateSplit(bytes_while_closed=amount)
    return GateSplit(
        bytes_while_closed=max(0, amount - int(fitting)), piece=int(min(PIECE, max(_LEAST_PIECE, fitting / _PIECES)))
    )


def bubbles_on(device: torch.device) -> BubbleGate:
    """Returns the bubbles of a worker with this device."""
    mark = stream.marker_of(device)
    return BubbleGate() if mark is None else StreamBubbles(mark)


class BubbleGate(Gate):
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
        """Context of this worker's waits for another one."""
        before, started_at = (self.is_open, self._waits), time.perf_counter()
        self._waits = True
        self.open()
        try:
            yield
        finally:
            was_open, self._waits = before
            if not was_open:
                self.close()
            self._waited_s += time.perf_counter() - started_at

    def take(self) -> float:
        """Records a completed iteration; returns the seconds of its waits."""
        waited_s, self._waited_s = self._waited_s, 0.0
        self._seconds.append(waited_s)
        return waited_s

    def copied(self, amount: int, seconds: float) -> None:
        if amount and seconds:
            self._rates.append(amount / seconds)

    def split(self, amount: int) -> GateSplit:
        """As :meth:`Gate.split`, with medians of the last iterations and snapshots."""
        is_measured = self._seconds and self._rates
        return split_of(amount, median_low(self._seconds) * median_low(self._rates) if is_measured else None)


class StreamBubbles(BubbleGate):
    """Bubbles measured on a device's stream, because the host enqueues an iteration before the device computes it.

    Copies pass unless the stream is in a forward or backward without a wait.
    """

    def __init__(self, mark: Marker):
        super().__init__()
        self._computed, self._waited = StreamSpans(mark), StreamSpans(mark)

    @property
    def is_open(self) -> bool:
        return super().is_open or not self._computed.under_way or self._waited.under_way

    @property
    def waits(self) -> bool:
        return self._waited.under_way

    def wait(self) -> None:
        """See :class:`Gate`; checks regularly, since nothing wakes this thread when the stream reaches a wait."""
        while not self.is_open:
            self._is_open.wait(_LOOKS_S)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """See :class:`BubbleGate`; when it returns, the stream may not have started."""
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
        with self._waited.span():
            yield

    def take(self) -> float:
        """See :class:`BubbleGate`; called after the commit all-reduce, when the host has waited for the stream."""
        self._waited_s = self._waited.take()
        return super().take()
