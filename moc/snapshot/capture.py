"""Copies of live memory that run beside the computation; the next update waits for them."""

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
"""Largest number of bytes copied between two checks of the gate."""

DEVICE_PIECE = 16 << 20
"""As :data:`PIECE`, on CUDA: copies of one direction are served in turn, and megatron-core's MoE layers copy the number
of tokens of each expert to the host before they dispatch; so such a layer waits for one piece at most, a third of a
millisecond over PCIe 5, and not for the whole snapshot."""


HOST_PIECE = 4 << 20
"""As :data:`PIECE`, for copies of host memory without a gate: one who waits makes the next piece meanwhile."""


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

    Args:
        piece: bytes copied between two checks of the gate; None for :data:`PIECE`.

    Attributes:
        passed: bytes that have passed meanwhile.
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

        The caller cannot continue before that, so it opens the gate, and helps where it can; without ``opens``, it
        leaves the gate as it is, and the work to others.
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


def capturer(device: torch.device, gate: Gate | None = None, check: Callable[[], None] = lambda: None) -> Capturer:
    """Returns the capturer for a device.

    Args:
        device: of the live memory.
        gate: see :class:`ThreadCapturer`; on CUDA there is always one, open by default.
        check: on CUDA, raises if what this worker has asked of its device so far cannot be trusted; called, by another
            thread, when the device has done it, and before it is copied.
    """
    if device.type != "cuda":
        return ThreadCapturer(gate)
    return Both(ThreadCapturer(gate or Gate(DEVICE_PIECE), FromDevice(device, check)), ThreadCapturer())


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


class FromHost:
    """How the thread copies what is in host memory; torch copies without holding the GIL."""

    def enter(self) -> None:
        """To be called once on the thread that copies."""

    def now(self) -> Any:
        """Returns a mark of what the calling thread has asked for so far."""

    def reach(self, mark: Any) -> None:
        """Returns once that is done."""

    def copy(self, copies: Sequence[Copy]) -> None:
        """Returns once everything is copied."""
        _copy_all(copies, non_blocking=False)


class FromDevice(FromHost):
    """How the thread copies from CUDA memory into pinned memory: on a stream of its own, beside the kernels of others.

    Every CUDA call is the thread's, which sleeps while it waits: the thread that trains records an event, and no more.

    Args:
        device: of the sources.
        check: as in :func:`capturer`.
    """

    def __init__(self, device: torch.device, check: Callable[[], None]):
        self._device, self._check = device, check
        self._stream: torch.cuda.Stream | None = None

    def enter(self) -> None:
        """See :class:`FromHost`."""
        torch.cuda.set_device(self._device)  # per thread; otherwise the first call makes a context on device 0
        self._stream = torch.cuda.Stream(self._device)

    def now(self) -> torch.cuda.Event:
        """See :class:`FromHost`: kernels on the current stream."""
        asked = torch.cuda.Event(blocking=True)  # otherwise a waiting thread keeps a core busy
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
    """Captures in a thread beside the computation.

    Args:
        gate: passed by copies piece by piece; without one, they are of host memory, and who waits helps.
        how: the thread copies what passes the gate.

    Raises:
        ValueError: there is no gate for what another way copies.
    """

    def __init__(self, gate: Gate | None = None, how: FromHost | None = None):
        if gate is None and how is not None:
            raise ValueError("copies that are not of host memory pass a gate: give one")
        self._gate, self._how = gate, how or FromHost()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot-capture", initializer=self._how.enter)
        self._last: Future | None = None

    def start(self, copies: Sequence[Copy]) -> Capture:
        """See :class:`Capturer`: what the sources hold once the device has done what it was asked for so far."""
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
    """Copies of host memory, which the thread makes, and whoever waits for them: by turns, the next piece.

    Args:
        copies: all of them.
        thread: makes them after those that were started before.
        last: of these, done when they are.

    Attributes:
        done: when the thread has nothing left to begin.
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
        self._over.wait()  # for the pieces of others
        if self._failure is not None:
            raise self._failure

    @property
    def seconds(self) -> float:
        self.wait(opens=False)
        return self._seconds

    def _make(self) -> None:
        """Makes copies until none is left that nobody has begun."""
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
            self._failure = error  # others may wait for this piece
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
    # one call, so that the GIL is not needed in between
    if copies:
        targets, sources = [copy.target for copy in copies], [copy.source for copy in copies]
        torch._foreach_copy_(targets, sources, non_blocking)  # pyright: ignore[reportPrivateImportUsage]  # no public one
