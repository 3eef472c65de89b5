"""Copies of live memory that run during computation; the next update waits for them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from moc.snapshot.copies import Copy, nbytes, pieces

PIECE = 64 << 20
"""Maximum number of bytes copied between two checks of the gate."""

DEVICE_PIECE = 16 << 20
"""As :data:`PIECE`, on CUDA, where copies of one direction run in turn. megatron-core's MoE layers copy each expert's
number of tokens to the host before they dispatch. With this limit such a layer waits for at most one piece, not for the
complete snapshot. A piece takes a third of a millisecond over PCIe 5."""


HOST_PIECE = 4 << 20
"""As :data:`PIECE`, for copies of host memory without a gate: a waiting caller copies the next piece."""


@dataclass(frozen=True)
class Split:
    """Division of copies at a gate.

    Attributes:
        beside: bytes that pass although it is closed, during computation.
        piece: bytes copied between two checks of the gate.
    """

    beside: int = 0
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

    def split(self, amount: int) -> Split:
        """Returns the division of ``amount`` bytes of a snapshot; by default, none pass while the gate is closed."""
        return Split(piece=self._piece or PIECE)

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


class FromHost:
    """Copies host memory for the thread; torch copies without holding the GIL."""

    def enter(self) -> None:
        """Prepares the copying thread; to be called once on it."""

    def now(self) -> Any:
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
        """See :class:`FromHost`."""
        torch.cuda.set_device(self._device)  # per thread; otherwise the first call creates a context on device 0
        self._stream = torch.cuda.Stream(self._device)

    def now(self) -> torch.cuda.Event:
        """See :class:`FromHost`: kernels on the current stream."""
        asked = torch.cuda.Event(blocking=True)  # otherwise a waiting thread occupies a core
        asked.record()
        return asked

    def reach(self, mark: torch.cuda.Event) -> None:
        """See :class:`FromHost`."""
        mark.synchronize()
        self._check()

    def copy(self, copies: Sequence[Copy]) -> None:
        """See :class:`FromHost`."""
        assert self._stream is not None  # enter() was called
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            _copy_all(copies, non_blocking=True)
            done.record()
        done.synchronize()


class ThreadCapturer(Capturer):
    """Captures in a background thread.

    Args:
        gate: controls each piece; without one, the copies are of host memory, and waiting callers help.
        how: copies for the thread, after the gate.

    Raises:
        ValueError: ``how`` is given without a gate.
    """

    def __init__(self, gate: Gate | None = None, how: FromHost | None = None):
        if gate is None and how is not None:
            raise ValueError("copies that are not of host memory pass a gate: give one")
        self._gate, self._how = gate, how or FromHost()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-capture", initializer=self._how.enter)
        self._last: Future | None = None

    def start(self, copies: Sequence[Copy]) -> Capture:
        """See :class:`Capturer`: copies the sources as they are after the device's work so far."""
        if self._gate is None:
            capture = _HostCapture(copies, self._thread, self._last)
            self._last = capture.done
            return capture
        done = self._thread.submit(_passed, copies, self._gate, self._how, self._how.now())
        return _ThreadCapture(done, self._gate)

    def close(self) -> None:
        """See :class:`Capturer`; opens the gate."""
        if self._gate is not None:
            self._gate.open()
        self._thread.shutdown(wait=True, cancel_futures=True)


class _ThreadCapture(Capture):
    def __init__(self, done: Future[_Passed], gate: Gate):
        self._done, self._gate = done, gate

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
        self._pieces, self._taking = pieces(copies, HOST_PIECE), threading.Lock()
        self._under_way, self._seconds, self._failure = 0, 0.0, None
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
                if self._under_way == 0:
                    self._over.set()

    def _copy(self, piece: list[Copy]) -> None:
        begun = time.perf_counter()
        try:
            _copy_all(piece, non_blocking=False)
        except BaseException as error:
            self._failure = error  # other threads may wait for this piece
            raise
        finally:
            with self._taking:
                self._seconds += time.perf_counter() - begun
                self._under_way -= 1

    def _take(self) -> list[Copy] | None:
        with self._taking:
            piece = next(self._pieces, None)
            self._under_way += piece is not None
            return piece


class _Passed(NamedTuple):
    seconds: float
    bubble_bytes: int


def _passed(copies: Sequence[Copy], gate: Gate, how: FromHost, mark: Any) -> _Passed:
    how.reach(mark)
    before, seconds = gate.passed, 0.0
    with torch.no_grad():
        for piece in gate.passing(copies):
            begun = time.perf_counter()
            how.copy(piece)
            seconds += time.perf_counter() - begun
    gate.copied(nbytes(copies), seconds)
    return _Passed(seconds, gate.passed - before)


def _copy_all(copies: Sequence[Copy], non_blocking: bool) -> None:
    # one call, so that the GIL is not needed between copies
    if copies:
        targets, sources = [copy.target for copy in copies], [copy.source for copy in copies]
        torch._foreach_copy_(targets, sources, non_blocking)  # pyright: ignore[reportPrivateImportUsage]  # no public one
