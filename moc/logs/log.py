"""Logs the tensors of an iteration that a replay needs, into reused host memory that outlives the process.

begin       takes the buffer of an iteration that is no longer needed, or a new one
write       copies each tensor as it becomes available: on CUDA on a separate stream, on the CPU immediately
end         a thread waits for the copies, hashes them, and names the buffer as the log of the iteration
collect     frees the buffers of iterations that a newer checkpoint supersedes

A log is a region file, like snapshot files (``docs/reference/format.md``). The name of an entry is its iteration, its
slot the key, and its region the full tensor.

Lists the tensors that cross pipeline stage boundaries in an iteration, in order. They follow from the schedule, so
sender and receiver number them identically without communication.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moc.errors import cause_of, with_code
from moc.files.safe_directory import SafeDirectory, remove_owned
from moc.state.operators import Region
from moc.store.buffers import HostBuffer
from moc.store.errors import CheckpointError, DamagedTensorError, MissingTensorError
from moc.store.manifest import compute_digest
from moc.store.shard_file import FileLayout, StoredTensorBox, TensorBox, read_stored_boxes
from moc.store.storage import LocalBlob

_FILE = re.compile(r"^iter_(\d{10})\.safetensors$")


class LogEntry(NamedTuple):
    """Tensor that is logged in every iteration, or in some; the key identifies it within an iteration."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def log_directory(root: Path, rank: int) -> Path:
    """Returns the directory of a rank's logs in its node's memory for this job."""
    return root / "logs" / f"rank_{rank:05d}"


def log_path(directory: Path, iteration: int) -> Path:
    """Returns the path of an iteration's complete log."""
    return directory / f"iter_{iteration:010d}.safetensors"


def logged_iterations(directory: Path) -> list[int]:
    """Returns the logged iterations, ascending."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(match[1]) for match in map(_FILE.match, names) if match)


def log_layout(iteration: int, entries: Iterable[LogEntry]) -> FileLayout:
    """Returns the layout of an iteration's log; its size is equal for all iterations with the same entries.

    The keys of the entries are the slots of the layout, which has its own order.
    """
    name = _entry_name(iteration)
    return FileLayout(
        TensorBox(name, key, shape, Region((0,) * len(shape), shape), dtype) for key, shape, dtype in entries
    )


class LogReader:
    """Reader of a rank's logs, which also works after that rank has ended."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._opened: tuple[int | None, dict[tuple[str, str], StoredTensorBox]] = None, {}

    def iterations(self) -> list[int]:
        """Returns the iterations with a complete log, ascending."""
        return logged_iterations(self._directory)

    def read(self, iteration: int, key: str) -> torch.Tensor:
        """Returns a logged tensor on the host, in its shape; callers must not change it.

        Raises:
            MissingTensorError: it was not logged.
            DamagedTensorError: its hash does not match.
        """
        source = self._entries(iteration).get((_entry_name(iteration), key))
        if source is None:
            raise MissingTensorError(
                f"{log_path(self._directory, iteration)} does not hold {key}. Fix: resume from a snapshot, "
                "with the layout that wrote the log",
                code="log-missing",
            )
        if damage := source.find_damage():
            raise DamagedTensorError(f"{damage}. Fix: resume from a snapshot")
        return source.read_tensor()

    def _entries(self, iteration: int) -> dict[tuple[str, str], StoredTensorBox]:
        if self._opened[0] != iteration:
            path = log_path(self._directory, iteration)
            try:
                sources = read_stored_boxes(LocalBlob(path, in_memory=True))
            except OSError:
                raise MissingTensorError(
                    f"{path} does not exist: iteration {iteration} was not logged. Fix: resume from a snapshot",
                    code="log-missing",
                ) from None
            self._opened = iteration, {(source.box.name, source.box.slot): source for source in sources}
        return self._opened[1]


def _entry_name(iteration: int) -> str:
    return f"iteration {iteration:010d}"


_MIN_BUFFERS = 2  # buffers: one is written while another is hashed


class LogWriter:
    """Writer of one rank's logs; not thread-safe.

    If ``limit`` or the memory is exhausted, the oldest iterations are removed and counted.

    Args:
        directory: directory of this rank's logs, in a memory file system.
        entries: tensors that an iteration may log; their keys differ.
        limit: bytes that logs may take.
        device: device of the tensors.
        name: name of these logs, in messages.
        limit_remedy: how to allow more bytes, in messages.
        alternative: how to do without these logs, in messages.

    Raises:
        CheckpointError: limit or memory is too small for two iterations.
    """

    def __init__(
        self,
        directory: Path,
        entries: Iterable[LogEntry],
        limit: float,
        device: torch.device,
        name: str,
        limit_remedy: str,
        alternative: str,
    ):
        self._directory, self._entries = directory, {entry.key: entry for entry in entries}
        self._name, self._alternative = name, alternative
        self._pin = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._pin else None
        # each thread has its own current CUDA device; without it, an event's wait creates a context on device 0
        enter = functools.partial(torch.cuda.set_device, device) if self._pin else None
        self._finalizer = ThreadPoolExecutor(1, thread_name_prefix="log-seal", initializer=enter)
        self._finalizing: Future | None = None
        self._free_buffers: list[HostBuffer] = []
        self._buffer_by_iteration: dict[int, HostBuffer | None] = {}  # by iteration; None for logs of another process
        self._current: tuple[int, FileLayout, HostBuffer] | None = None
        self._views: dict[str, torch.Tensor] = {}
        self.dropped_iterations = 0
        """Iterations whose logs were removed for lack of room."""
        self.log_bytes = log_layout(0, self._entries.values()).nbytes
        """Size of an iteration's log."""
        self._max_buffers = int(limit // self.log_bytes)
        if self._max_buffers < _MIN_BUFFERS:
            raise CheckpointError(
                f"{name}s need {self.log_bytes:,} bytes for an iteration, and {_MIN_BUFFERS} of them do not fit into "
                f"{limit:,.0f}. Fix: {limit_remedy}, or {alternative}",
                code="log-memory-too-small",
            )
        self._failure: str | None = None
        self._find_existing_logs()
        for _ in range(_MIN_BUFFERS):
            self._free_buffers.append(self._new_buffer())

    @property
    def bytes(self) -> int:
        """Host memory in use."""
        return self._buffer_count * self.log_bytes

    def bytes_for(self, iterations: int) -> int:
        """Returns the host memory that :meth:`reserve` allocates in total."""
        return self._buffers_for(iterations) * self.log_bytes

    def reserve(self, iterations: int) -> None:
        """Allocates memory for the logs of this many iterations, up to the limit.

        Raises:
            CheckpointError: the node has too little memory.
        """
        while self._buffer_count < self._buffers_for(iterations):
            self._free_buffers.append(self._new_buffer())

    def _buffers_for(self, iterations: int) -> int:
        return min(self._max_buffers, iterations + _MIN_BUFFERS)

    @property
    def iterations(self) -> list[int]:
        """Iterations whose log is complete, or is being hashed; ascending."""
        return sorted(self._buffer_by_iteration)

    def begin(self, iteration: int, keys: Collection[str] | None = None) -> None:
        """Starts the log of an iteration; drops logs of this and later ones, left by a run that rolled back.

        It logs the entries of ``keys``, by default all.
        """
        self.pause()
        for later in [later for later in self._buffer_by_iteration if later >= iteration]:
            self._drop(later)
        logged = self._entries.values() if keys is None else [self._entries[key] for key in keys]
        buffer, layout = self._take_buffer(), log_layout(iteration, logged)
        self._current = iteration, layout, buffer
        self._views = {
            entry.slot: buffer.view(start, stop, entry.dtype).view(entry.global_shape)
            for entry, (start, stop) in zip(layout.entries, layout.spans, strict=True)
        }

    def write(self, key: str, tensor: torch.Tensor) -> None:
        """Copies a tensor; it may be freed, but not changed, before :meth:`end` is done.

        Raises:
            CheckpointError: there is no such entry to log, or shape or dtype differ.
        """
        assert self._current is not None  # between begin() and end()
        target = self._views.pop(key, None)
        if target is None or tensor.shape != target.shape or tensor.dtype != target.dtype:
            raise CheckpointError(
                f"{key} of shape {tuple(tensor.shape)} and dtype {tensor.dtype} is not what was to be logged in "
                f"iteration {self._current[0]}. Fix: {self._alternative}",
                code="logging-unsupported",
            )
        with torch.no_grad():
            if self._stream is None:
                target.copy_(tensor)
                return
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                target.copy_(tensor, non_blocking=True)
            tensor.record_stream(self._stream)  # its memory is not reused before the copy is done

    def end(self) -> None:
        """Ends the iteration; its log is complete after a thread has hashed it.

        Raises:
            CheckpointError: an entry of the iteration was not logged.
        """
        assert self._current is not None  # begin() was called
        iteration, layout, buffer = self._current
        if self._views:
            raise CheckpointError(
                f"{next(iter(self._views))} was not logged in iteration {iteration}. Fix: {self._alternative}",
                code="logging-unsupported",
            )
        # blocking: otherwise the waiting thread keeps a core busy
        copied = None if self._stream is None else self._stream.record_event(torch.cuda.Event(blocking=True))
        self._current, self._buffer_by_iteration[iteration] = None, buffer
        self._finalizing = self._finalizer.submit(self._finalize, iteration, layout, buffer, copied)

    def collect(self, before: int) -> None:
        """Frees the memory of logs before iteration ``before`` for later ones."""
        for iteration in [iteration for iteration in self._buffer_by_iteration if iteration < before]:
            self._drop(iteration)

    def failure(self) -> str | None:
        """Returns the failure of background work, or None."""
        if self._finalizing is not None and self._finalizing.done():
            self.wait()
        return self._failure

    def wait(self) -> None:
        """Waits until every ended log is complete, or :meth:`failure` returns the reason."""
        if self._finalizing is not None and (error := self._finalizing.exception()) is not None:
            self._failure = with_code(
                CheckpointError(
                    f"the {self._name} in {self._directory} cannot be written ({cause_of(error)}). Fix: make room, and "
                    "start again",
                    code="storage-unwritable",
                )
            )

    def pause(self) -> None:
        """Ends pending work and discards an interrupted iteration; complete logs stay in place."""
        self.wait()
        if self._current is None:
            return
        if self._stream is not None:
            self._stream.synchronize()  # a pending copy would write into reused or freed memory
        self._free_buffers.append(self._current[2])
        self._current, self._views = None, {}

    def close(self) -> None:
        """Ends pending work and frees the memory; complete logs stay in place."""
        self.pause()
        self._finalizer.shutdown(wait=True)
        buffers = [*self._free_buffers, *self._buffer_by_iteration.values()]
        self._free_buffers, self._buffer_by_iteration = [], {}
        for buffer in filter(None, buffers):
            buffer.close()

    def delete(self) -> None:
        """Removes all logs, because nothing is left to recover."""
        self.close()
        with contextlib.suppress(OSError):  # other logs remain
            remove_owned(self._directory)
            for above in list(self._directory.parents)[:2]:
                SafeDirectory(above.parent).remove_if_empty(above.name)

    @property
    def _buffer_count(self) -> int:
        return len(self._free_buffers) + len(self._buffer_by_iteration) + (self._current is not None)

    def _find_existing_logs(self) -> None:
        """Registers the logs of the previous process; removes incomplete, surplus and other layouts' logs."""
        with contextlib.suppress(OSError):
            remove_owned(self._directory / "slots")
        for iteration in reversed(logged_iterations(self._directory)):
            path = log_path(self._directory, iteration)
            if (
                path.lstat().st_size == self.log_bytes
                and len(self._buffer_by_iteration) + _MIN_BUFFERS < self._max_buffers
            ):
                self._buffer_by_iteration[iteration] = None
            else:
                remove_owned(path)

    def _new_buffer(self) -> HostBuffer:
        taken = {
            buffer.path.name
            for buffer in (*self._free_buffers, *self._buffer_by_iteration.values())
            if buffer is not None and buffer.path
        }
        number = next(number for number in range(len(taken) + 1) if str(number) not in taken)
        path = self._directory / "slots" / str(number)
        return HostBuffer(self.log_bytes, path, self._pin, purpose=f"the {self._name}'s", remedy=self._alternative)

    def _take_buffer(self) -> HostBuffer:
        while not self._free_buffers:
            try:
                if self._buffer_count < self._max_buffers:
                    return self._new_buffer()
            except CheckpointError:  # memory is exhausted: treated as a lower limit
                self._max_buffers = max(_MIN_BUFFERS, self._buffer_count)
            self.dropped_iterations += 1
            self._drop(min(self._buffer_by_iteration))
        return self._free_buffers.pop()

    def _drop(self, iteration: int) -> None:
        """Removes a log: first its name, so that no partial log counts as complete; then frees its buffer."""
        self.wait()
        remove_owned(log_path(self._directory, iteration))
        buffer = self._buffer_by_iteration.pop(iteration)
        if buffer is not None:
            self._free_buffers.append(buffer)

    def _finalize(self, iteration: int, layout: FileLayout, buffer: HostBuffer, copy_event: Any) -> None:
        if copy_event is not None:
            copy_event.synchronize()
        digests = [compute_digest(buffer.memory[start:stop]) for start, stop in layout.spans]
        header = layout.header(digests)
        buffer.memory[: len(header)] = header
        assert buffer.path is not None  # _slot() gave it one
        os.link(buffer.path, log_path(self._directory, iteration))


class Direction(Enum):
    """Direction of a crossing: activations go forward, their gradients backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Crossing:
    """Tensor that one stage sends to another, once per iteration.

    Attributes:
        chunk: model chunk of the sender that computes it.
        micro_batch: number of its micro batch, from 0.
    """

    direction: Direction
    chunk: int
    micro_batch: int

    @property
    def key(self) -> str:
        """Key of the tensor in logs."""
        return f"{self.direction.value} chunk {self.chunk} micro batch {self.micro_batch}"


@dataclass(frozen=True)
class Pipeline:
    """Pipeline stages and their order of computation.

    Chunk c of stage s is the part c * stages + s of the model.

    Attributes:
        stages: number of stages.
        turns: ``(micro batch, chunk)`` in the order of forward passes, identical on all stages.  Backward passes take
            the micro batches in the same order, and the chunks in reverse.
    """

    stages: int
    forward_order: tuple[tuple[int, int], ...]

    @cached_property
    def chunks(self) -> int:
        """Number of model chunks per stage."""
        return 1 + max(chunk for _, chunk in self.forward_order)

    def sender(self, stage: int, direction: Direction) -> int:
        """Returns the stage whose tensors a stage receives."""
        return (stage + (-1 if direction is Direction.FORWARD else 1)) % self.stages

    def sent_by(self, stage: int, direction: Direction) -> list[Crossing]:
        """Returns the tensors that a stage sends in one direction per iteration, in order."""
        if direction is Direction.FORWARD:
            last = (self.stages - 1, self.chunks - 1)
            return [Crossing(direction, chunk, i) for i, chunk in self.forward_order if (stage, chunk) != last]
        chunks = ((i, self.chunks - 1 - chunk) for i, chunk in self.forward_order)
        return [Crossing(direction, chunk, i) for i, chunk in chunks if (stage, chunk) != (0, 0)]

    def senders(self, stage: int) -> frozenset[int]:
        """Returns the stages that a stage receives from."""
        return frozenset(self.sender(stage, direction) for direction in Direction if self.received_by(stage, direction))

    def received_by(self, stage: int, direction: Direction) -> list[Crossing]:
        """Returns the tensors that a stage receives in one direction per iteration, in order, named as by their sender.

        A stage sends to one other stage per direction, and channels keep their order.
        """
        return self.sent_by(self.sender(stage, direction), direction)
