"""Captures, finalizes and writes one rank's part of every snapshot, each in the background."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from moc.background import GivenUpError, background, with_retries
from moc.fault_points import reach
from moc.files.safe_directory import SafeDirectory, remove_owned
from moc.snapshot.buffer_pool import KeptBuffers
from moc.snapshot.contents import Share
from moc.snapshot.device_copy import Capture, Captures, Copy, Gate, capturer, coalesced
from moc.snapshot.staging import GradientStaging
from moc.state.operators import Detail, operator_of
from moc.store.buffers import HostBuffer
from moc.store.errors import OUT_OF_SPACE_ERRNOS, CheckpointError, InsufficientMemoryError
from moc.store.manifest import FileEntry, OperatorEntry, RankReport, StateDigests
from moc.store.reserved_memory import SLOTS_DIRECTORY
from moc.store.shard_file import FileLayout, TensorBox, compute_digest
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name, shard_file_name

_CHUNK = 16 << 20  # bytes per write
_GRAD = "grad"
_OVERWRITTEN = bytes(8)  # no header starts like this, so overwritten snapshots are detected
_REMEMBERED = 16  # shares per buffer; the shares of a window take turns


Hashes = Callable[[HostBuffer, Sequence[tuple[int, int]]], tuple[str, ...]]
"""Returns the hashes of spans of a buffer."""


@dataclass(eq=False)
class Snapshot:
    """One rank's part of a snapshot.

    Attributes:
        iteration: iterations completed when it was taken.
        layout: of ``buffer``, which contains the file as it will be stored.
        buffer: host memory.
        operators: manifest entries of its operators.
        capture: the copies into the buffer.
        state: the copies of state, which the next update changes.
        gradients: the copies of gradients, which the next iteration clears; None without gradients, or if the second
            buffer on the device has them.
        in_memory: it goes to the memory tier, if there is one; otherwise only to storage.
        after: must be done before the snapshot counts as finalized.
        stored: as in :class:`~moc.snapshot.contents.Share`.
        digests: returns the digests of this rank's state; may wait for the device.
        finalized: done when the buffer contains the complete file, hashes included; with a memory tier, in memory that
            outlives this process.
        hashes: hashes of the entries, once it is finalized.
        persisted: done when storage has it; None until :meth:`Saver.persist` is called.
        delay: returns the delay of training by the second buffer, in seconds; valid after ``capture``.
        gradients_s: seconds that training waited for ``gradients``.
        finalize_s: seconds that hashing took.
        persist_s: seconds that writing took.
        persisted_bytes: bytes written to storage.
        retries: writes that were repeated.
    """

    iteration: int
    layout: FileLayout
    buffer: HostBuffer
    operators: Mapping[str, OperatorEntry]
    capture: Capture
    state: Capture
    gradients: Capture | None = None
    in_memory: bool = True
    after: Future | None = None
    stored: Collection[TensorBox] | None = None
    digests: Callable[[], StateDigests | None] = lambda: None
    delay: Callable[[], float] = float
    gradients_s: float = 0.0
    finalized: Future = field(init=False)
    hashes: tuple[str, ...] = ()
    persisted: Future | None = None
    finalize_s: float = 0.0
    persist_s: float = 0.0
    persisted_bytes: int = 0
    retries: int = 0


class Saver:
    """Captures, finalizes and writes in threads; the futures of a snapshot raise their errors.

    Args:
        rank: of this worker.
        device: of the live memory.
        memory: tier in this node's memory, if there is one.
        storage: tier beyond it; needed by :meth:`persist`.
        gate: delays copies; see :class:`~moc.snapshot.device_copy.ThreadCapturer`.
        kept: provides an earlier generation's buffers, and receives this one's; None to free them.
        check: as in :func:`~moc.snapshot.device_copy.capturer`.
        hashes: hashes entries, on the thread that finalizes.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        memory: Store | None,
        storage: Store | None,
        gate: Gate | None = None,
        kept: KeptBuffers | None = None,
        check: Callable[[], None] = lambda: None,
        hashes: Hashes | None = None,
    ):
        self._hashes: Hashes = hashes or hashed
        self._rank, self._device, self._memory, self._storage = rank, device, memory, storage
        self._kept, self._check, self._keeps = kept or KeptBuffers(), check, kept is not None
        self._kept.keep_only(_slot_of(rank))  # before the rank's new worker creates files of these names
        self._capturer = capturer(device, gate, check)
        self._finalizing = ThreadPoolExecutor(1, thread_name_prefix="snapshot-seal")
        self._writing, self._written, self._given_up = background("snapshot-persist"), {}, threading.Event()
        self._buffers: dict[int, HostBuffer] = {}
        self._copies: dict[HostBuffer, dict[Share, tuple[list[Copy], list[Copy]]]] = defaultdict(dict)

    @functools.cached_property
    def _staging(self) -> GradientStaging:
        return GradientStaging(self._device)

    def reserve(self, slot: int, nbytes: int, max_nbytes: float = math.inf) -> None:
        """Allocates a buffer for a slot; keeps an existing one of ``nbytes`` to ``max_nbytes`` bytes.

        Raises:
            InsufficientMemoryError: there is too little memory.
        """
        buffer = self._buffers.get(slot)
        if buffer is not None and nbytes <= buffer.nbytes <= max_nbytes:
            return
        self._release_buffer(slot)
        directory = self._directory
        buffer = self._kept.take(nbytes, directory)
        self._buffers[slot] = buffer or HostBuffer(nbytes, self._new_path(), pin=self._device.type == "cuda")

    def trim(self, slots: int) -> None:
        """Frees the buffers of all slots from ``slots`` on, and kept ones without a slot."""
        for slot in [slot for slot in self._buffers if slot >= slots]:
            self._release_buffer(slot)
        self._kept.trim(max(0, slots - len(self._buffers)))

    def reuse_buffers(self, iterations: Iterable[int]) -> None:
        """Assigns the kept buffers with the committed snapshots of these iterations, if any, to the slots from 0 on."""
        for slot, iteration in enumerate(iterations):
            directory = self._memory_storage().root / checkpoint_name(iteration)
            buffer = self._kept.committed_as(directory / shard_file_name(self._rank))
            if buffer is not None:
                self._buffers[slot] = buffer

    def remove_leftovers(self, of_other_ranks: bool, node_ranks: Collection[int]) -> None:
        """Removes the names of buffers that earlier processes of this rank left in memory.

        With ``of_other_ranks``, also the names left by ranks that are no longer on this node, outside ``node_ranks``.
        """
        if self._directory is None or not self._directory.is_dir():
            return
        local_paths = self._kept.paths | {buffer.path for buffer in self._buffers.values()}
        leftovers = [path for path in self._directory.glob(f"{_slot_of(self._rank)}.*") if path not in local_paths]
        if of_other_ranks:
            node_slots = {_slot_of(rank) for rank in node_ranks}
            leftovers += [path for path in self._directory.glob("rank_*") if path.stem not in node_slots]
        for path in leftovers:
            remove_owned(path)

    def sibling(self) -> Saver:
        """Returns another saver with the same memory and storage, which shares the kept buffers."""
        kept = self._kept if self._keeps else None
        return Saver(self._rank, self._device, self._memory, self._storage, kept=kept, check=self._check)

    def take(
        self,
        slot: int,
        iteration: int,
        share: Share,
        operators: Mapping[str, OperatorEntry],
        other_slots: Iterable[int] = (),
        in_memory: bool = True,
        after: Future | None = None,
        nbytes: int | None = None,
        digests: Callable[[], StateDigests | None] = lambda: None,
    ) -> Snapshot:
        """Starts to copy a share into a slot's buffer and to finalize it, without waiting.

        State must not change before ``state.wait()`` has returned, and gradients, if ``gradients`` is set, before
        ``gradients.wait()`` has returned. Otherwise gradients may change at once: they are in a second buffer, which is
        copied last. If its earlier content is not copied yet, this call waits.

        Args:
            slot: number of the slot.
            iteration: iterations completed.
            share: this rank's share.
            operators: manifest entries of its operators.
            other_slots: further free slots. The smallest of all their buffers that fits becomes this slot's. If memory
                is insufficient, their buffers are freed.
            in_memory: as in :class:`Snapshot`.
            after: as in :class:`Snapshot`.
            nbytes: bytes of a buffer for every snapshot of the window, if it is one of several; a larger buffer is then
                replaced.
            digests: as in :class:`Snapshot`.

        Returns:
            The snapshot; if memory is insufficient, ``finalized`` raises InsufficientMemoryError.
        """
        other_slots, min_nbytes = [other for other in other_slots if other != slot], share.layout.nbytes
        size = max(min_nbytes, nbytes or 0)
        max_nbytes = math.inf if nbytes is None else size
        self._swap(slot, other_slots, min_nbytes, max_nbytes)
        try:
            self._reserve_or_release(slot, other_slots, min_nbytes, size, max_nbytes)
        except InsufficientMemoryError as error:
            no_copies = Captures([])
            snapshot = Snapshot(
                iteration,
                share.layout,
                HostBuffer(0),
                operators,
                no_copies,
                no_copies,
                in_memory=in_memory,
                after=after,
                stored=share.stored,
            )
            snapshot.finalized = self._finalizing.submit(_fail, after, error)
            return snapshot
        buffer = self._buffers[slot]
        buffer.memory[: len(_OVERWRITTEN)] = _OVERWRITTEN
        snapshot = Snapshot(
            iteration,
            share.layout,
            buffer,
            operators,
            **self._start(*self._copies_into(buffer, share))._asdict(),
            in_memory=in_memory,
            after=after,
            stored=share.stored,
            digests=digests,
        )
        snapshot.finalized = self._finalizing.submit(self._finalize, snapshot)
        return snapshot

    def _start(self, gradients: list[Copy], state: list[Copy]) -> _Started:
        """Starts all copies of a snapshot, first the copies that training waits for."""
        start = self._capturer.start
        staged = self._staging.stage(gradients) if gradients else None
        if staged is not None:
            reach("gradient_staged")
            copies, delay = staged
            state_captures = start(state) if state else Captures([])
            later = start(copies)
            self._staging.is_read_by(later)
            return _Started(Captures([state_captures, later]), state_captures, None, delay)
        first = start(gradients) if gradients else None
        state_captures = start(state) if state else Captures([])
        return _Started(
            state_captures if first is None else Captures([first, state_captures]), state_captures, first, float
        )

    def _reserve_or_release(
        self, slot: int, other_slots: Iterable[int], min_nbytes: int, size: int, max_nbytes: float
    ) -> None:
        buffer = self._buffers.get(slot)
        if buffer is not None and min_nbytes <= buffer.nbytes <= max_nbytes:
            return
        try:
            self.reserve(slot, size, max_nbytes)
        except InsufficientMemoryError:
            for other_slot in other_slots:
                self._release_buffer(other_slot)
            self.reserve(slot, size, max_nbytes)

    def _swap(self, slot: int, other_slots: Iterable[int], nbytes: int, max_nbytes: float) -> None:
        fitting = [
            s for s in (slot, *other_slots) if s in self._buffers and nbytes <= self._buffers[s].nbytes <= max_nbytes
        ]
        best = min(fitting, key=lambda s: self._buffers[s].nbytes, default=slot)
        if best != slot:
            buffer, previous = self._buffers.pop(best), self._buffers.pop(slot, None)
            self._buffers[slot] = buffer
            if previous is not None:
                self._buffers[best] = previous

    def _release_buffer(self, slot: int) -> None:
        buffer = self._buffers.pop(slot, None)
        if buffer is not None:
            self._copies.pop(buffer, None)
            buffer.close()

    def _copies_into(self, buffer: HostBuffer, share: Share) -> tuple[list[Copy], list[Copy]]:
        """Returns the copies of gradients, and all others."""
        copies_by_share = self._copies[buffer]
        if share not in copies_by_share:
            if len(copies_by_share) == _REMEMBERED:
                copies_by_share.pop(next(iter(copies_by_share)))
            layout, kinds = share.layout, ([], [])
            for entry, span, source in zip(layout.entries, layout.spans, share.sources, strict=True):
                kinds[entry.slot != _GRAD].append((source, span))
            copies_by_share[share] = _copies(buffer, kinds[0]), _copies(buffer, kinds[1])
        return copies_by_share[share]

    def persist(
        self, snapshot: Snapshot, operators: Mapping[str, Detail] | None = None, pauses_s: Sequence[float] = ()
    ) -> None:
        """Starts to write a snapshot to storage once it is finalized, without waiting.

        Args:
            snapshot: to write.
            operators: operators to write, each at its detail; all by default.
            pauses_s: pauses before the repetitions of a failed write.
        """
        snapshot.persisted = self._writing.submit(self._persist, snapshot, operators, pauses_s)
        unfinished = {write: buffer for write, buffer in self._written.items() if not write.done()}
        self._written = unfinished | {snapshot.persisted: snapshot.buffer}

    def check_room(self, nbytes: int) -> None:
        """Checks that storage has room for a part of ``nbytes`` bytes.

        Raises:
            CheckpointError: it has not.
            OSError: storage fails.
        """
        assert self._storage is not None  # callers write there
        storage = self._storage.storage
        free = storage.free_bytes()
        if free is not None and free < nbytes:
            raise CheckpointError(
                f"{storage.name} has {free:,} bytes left, and the part of rank {self._rank} has {nbytes:,}. "
                "Fix: make room, keep fewer checkpoints with --ckpt-keep, or name another --ckpt-dir",
                code="disk-full",
            )

    def close(self, patience: float = 0.0) -> None:
        """Ends pending work, and keeps or frees the buffers; files named in memory or storage stay.

        Copied snapshots are finalized first, since other ranks may have the matching parts. A started write to storage
        may take ``patience`` seconds to complete. Then it is abandoned: it keeps its memory until it ends, and is not
        reported.
        """
        self._capturer.close()
        started = [write for write in self._written if not write.cancel()]
        self._finalizing.shutdown(wait=True)
        wait(started, timeout=patience)
        self._given_up.set()
        self._copies.clear()
        busy = {buffer for write, buffer in self._written.items() if not write.done()}
        buffers, self._buffers = [*self._buffers.values()], {}
        self._kept.keep(buffer for buffer in buffers if self._keeps and buffer not in busy)
        for buffer in buffers:
            if not self._keeps or buffer in busy:
                buffer.close()

    def _finalize(self, snapshot: Snapshot) -> RankReport:
        reach("snapshot_copying")
        snapshot.capture.wait(opens=False)
        started_at = time.perf_counter()
        layout, memory = snapshot.layout, snapshot.buffer.memory
        snapshot.hashes = self._hashes(snapshot.buffer, layout.spans)
        header = layout.header(snapshot.hashes)
        memory[: len(header)] = header
        entry = FileEntry(layout.nbytes, len(header), compute_digest(header))
        part = RankReport(shard_file_name(self._rank), entry, snapshot.operators, digests=snapshot.digests())
        if self._memory is not None and snapshot.in_memory:
            try:
                part = self._name_in_memory(snapshot, part)
            except InsufficientMemoryError as error:
                _fail(snapshot.after, error)
        snapshot.finalize_s = time.perf_counter() - started_at
        if snapshot.after is not None:
            snapshot.after.result()
        reach("snapshot_finalized")
        return part

    def _persist(
        self, snapshot: Snapshot, operators: Mapping[str, Detail] | None, pauses_s: Sequence[float] = ()
    ) -> None:
        part = snapshot.finalized.result()
        self._unless_given_up()
        write = functools.partial(self._persist_finalized, snapshot, operators, part)
        snapshot.retries = with_retries(write, pauses_s, self._given_up)

    def _persist_finalized(self, snapshot: Snapshot, operators: Mapping[str, Detail] | None, part: RankReport) -> None:
        started_at = time.perf_counter()
        parts = [snapshot.buffer.memory[: snapshot.layout.nbytes]]
        if operators is not None or snapshot.stored is not None:
            subset, parts = self._subset(snapshot, operators)
            part = dataclasses.replace(subset, digests=part.digests)
        self._write_part(snapshot.iteration, part, parts)
        snapshot.persisted_bytes = part.file.bytes
        snapshot.persist_s = time.perf_counter() - started_at

    def _subset(
        self, snapshot: Snapshot, operators: Mapping[str, Detail] | None
    ) -> tuple[RankReport, list[memoryview]]:
        """Returns report and content of a file with part of a snapshot: a new header, and pieces of the buffer."""
        selected, elements = [], defaultdict(lambda: defaultdict(int))
        if operators is None:
            operators = {name: Detail(entry.detail) for name, entry in snapshot.operators.items()}
        for entry, span, digest in zip(snapshot.layout.entries, snapshot.layout.spans, snapshot.hashes, strict=True):
            name = operator_of(entry.name)
            is_stored = snapshot.stored is None or entry in snapshot.stored
            if is_stored and name in operators and operators[name].holds(entry.slot):
                selected.append((entry, span, digest))
                elements[name][entry.slot] += entry.region.numel
        layout = FileLayout(entry for entry, _, _ in selected)  # keeps the order, which is by width
        header = layout.header([digest for _, _, digest in selected])
        entries = {
            name: OperatorEntry(operators[name].value, snapshot.operators[name].step, dict(slots))
            for name, slots in elements.items()
        }
        chunks = [snapshot.buffer.memory[start:stop] for _, (start, stop), _ in selected]
        file = FileEntry(layout.nbytes, len(header), compute_digest(header))
        return RankReport(shard_file_name(self._rank), file, entries), [memoryview(header), *chunks]

    def _write_part(self, iteration: int, part: RankReport, parts: Sequence[memoryview]) -> None:
        assert self._storage is not None  # persist() needs storage
        storage = self._storage.storage
        self.check_room(part.file.bytes)
        try:
            self._storage.write_file(iteration, self._rank, self._chunks(parts))
            reach("persisting")
            self._unless_given_up()
            self._storage.store_report(iteration, self._rank, part)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of iteration {iteration} cannot be written to {storage.name} "
                f"({error.strerror or error}), and earlier ones are unchanged. Fix: make room or repair it, and start "
                "again",
                code="storage-unwritable",
            ) from error

    def _chunks(self, parts: Sequence[memoryview]) -> Iterator[memoryview]:
        for part in parts:
            for start in range(0, len(part), _CHUNK):
                self._unless_given_up()
                yield part[start : start + _CHUNK]
        self._unless_given_up()

    def _unless_given_up(self) -> None:
        if self._given_up.is_set():
            raise GivenUpError

    def _name_in_memory(self, snapshot: Snapshot, part: RankReport) -> RankReport:
        memory = self._memory
        assert memory is not None  # checked by _finalize()
        try:
            self._link(snapshot)
            return memory.store_report(snapshot.iteration, self._rank, part)
        except OSError as error:
            raise (InsufficientMemoryError if error.errno in OUT_OF_SPACE_ERRNOS else CheckpointError)(
                f"the snapshot of iteration {snapshot.iteration} cannot be named in {memory.storage.name} "
                f"({error.strerror or error}), and earlier ones are unchanged. Fix: make room or repair it, and start "
                "again",
                code="storage-unwritable",
            ) from error

    def _link(self, snapshot: Snapshot) -> None:
        """Names the buffer as the rank's file of the checkpoint: the same memory, no copy."""
        assert snapshot.buffer.path is not None  # _new_path() gave it one
        root = self._memory_storage().root
        source = snapshot.buffer.path.relative_to(root).as_posix()
        SafeDirectory(root, is_owned=True).link(
            source, f"{checkpoint_name(snapshot.iteration)}/{shard_file_name(self._rank)}"
        )

    @property
    def _directory(self) -> Path | None:
        """Directory with the buffers' own names; None without a memory tier."""
        return None if self._memory is None else self._memory_storage().root / SLOTS_DIRECTORY

    def _new_path(self) -> Path | None:
        directory = self._directory
        if directory is None:
            return None
        paths_in_use = self._kept.paths | {buffer.path for buffer in self._buffers.values()}
        names = (directory / f"{_slot_of(self._rank)}.{number}" for number in range(len(paths_in_use) + 1))
        path = next(name for name in names if name not in paths_in_use)
        remove_owned(path)
        return path

    def _memory_storage(self) -> LocalStorage:
        assert self._memory is not None  # checked by callers
        storage = self._memory.storage
        if not isinstance(storage, LocalStorage):
            raise TypeError(f"{storage.name} is not memory of this machine")
        return storage


class _Started(NamedTuple):
    """Copies of a snapshot, as in :class:`Snapshot`."""

    capture: Capture
    state: Capture
    gradients: Capture | None
    delay: Callable[[], float]


def _fail(after: Future | None, error: InsufficientMemoryError) -> NoReturn:
    """Raises an error after ``after`` is done."""
    if after is not None:
        after.result()
    raise error


def hashed(buffer: HostBuffer, spans: Iterable[tuple[int, int]]) -> tuple[str, ...]:
    """Returns the hashes of spans of a buffer, each of bytes [start, stop)."""
    return tuple(compute_digest(buffer.memory[start:stop]) for start, stop in spans)


def _slot_of(rank: int) -> str:
    return f"rank_{rank:05d}"


def _copies(buffer: HostBuffer, parts: Sequence[tuple[torch.Tensor, tuple[int, int]]]) -> list[Copy]:
    copies = []
    for run in _runs(coalesced((source for source, _ in parts), (span for _, span in parts))):
        sources, starts, ends = zip(*run, strict=True)
        values = buffer.values[starts[0] : ends[-1]].view(sources[0].dtype)
        targets = values.split([source.numel() for source in sources])
        copies += map(Copy, sources, targets)
    return copies


def _runs(parts: Iterable[tuple[torch.Tensor, int, int]]) -> Iterator[list[tuple[torch.Tensor, int, int]]]:
    """Cuts parts into runs of one dtype that are consecutive in the file."""
    run = []
    for source, start, stop in parts:
        if run and (run[-1][2] != start or run[-1][0].dtype != source.dtype):
            yield run
            run = []
        run.append((source, start, stop))
    if run:
        yield run
