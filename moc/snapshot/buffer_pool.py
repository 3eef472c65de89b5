"""Rotates buffers so that one complete snapshot exists at every moment (MoC-System, section 5.2).

A state machine without side effects. All ranks process the same events in the same order, since each iteration's commit
all-reduce carries facts known to only one rank. So all agree on whether a buffer is free.

    FREE -> FILLING -> RECOVERY -> RETIRING -> FREE

* FILLING: being copied into; no rank knows yet whether all have the snapshot. If a rank lacks memory for its part, all
  abandon the snapshot, and it retires.
* RECOVERY: all ranks have this snapshot, and no newer one supersedes it.
* RETIRING: a newer one supersedes it, but may not be committed yet; after the next commit all-reduce it is.

A full snapshot supersedes all earlier ones. A snapshot of a window (MoEvement, section 3.2) supersedes others only if
it ends the window: all that precede the window. So the newest complete window and all of the current one stay.

A buffer that is being written to storage is not free in any state. If memory keeps the state for recovery, the caller
writes one snapshot or window at a time to storage. So there is always another buffer, even if storage is slow.

Retains buffers across generations, because allocating gigabytes and pinning them for CUDA takes seconds. A buffer in
a memory file system may contain a snapshot, which a second hard link commits. After the run has resumed, this buffer
belongs to the snapshot's slot again. It is free only when no other name exists.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from moc.store.buffers import HostBuffer
from moc.store.host_memory import most_buffers


class Use(Enum):
    """Use of a buffer."""

    FREE = "free"
    FILLING = "filling"
    RECOVERY = "recovery"
    RETIRING = "retiring"


_NEWEST_FIRST = (Use.FILLING, Use.RECOVERY, Use.RETIRING, Use.FREE)
"""Uses of two buffers with the snapshot of one iteration; the newer buffer is first."""


@dataclass(frozen=True)
class Slot:
    """One buffer.

    Attributes:
        use: of the buffer, apart from being written to storage.
        iteration: of the snapshot that it contains.
        persisting: it is being written to storage, by this rank or another.
        supersedes: once all ranks have it, snapshots before this iteration are not needed; None if they are.
        superseded_by: iteration of the snapshot that made a retiring one obsolete.
    """

    use: Use = Use.FREE
    iteration: int | None = None
    persisting: bool = False
    supersedes: int | None = None
    superseded_by: int | None = None

    @property
    def free(self) -> bool:
        """Whether the buffer may be written to."""
        return self.use is Use.FREE and not self.persisting


@dataclass(frozen=True)
class Rotation:
    """Buffers for recovery and spare buffers, identical on every rank.

    Attributes:
        slots: the buffers; their number grows on demand.
        spare: buffers that may be in use in addition to recovery's. All buffers that one snapshot makes obsolete count
            as one until the next commit all-reduce. With ``keep``, so do all buffers that only storage still needs.
        keep: memory keeps the state for recovery; otherwise storage does.
        stores: with ``keep``, snapshots also go to storage.
    """

    slots: tuple[Slot, ...]
    spare: int
    keep: bool
    stores: bool = True

    @classmethod
    def of(cls, spare: int, keep: bool, recovered: Iterable[int] = (), stores: bool = True) -> Rotation:
        """Starts with the buffers of snapshots that an earlier job left in memory, and no others."""
        slots = tuple(Slot(Use.RECOVERY, iteration, supersedes=iteration) for iteration in recovered) if keep else ()
        return cls(slots, spare, keep, stores)

    def free(self) -> int | None:
        """Returns the lowest free buffer, which may be a new one, or None."""
        filling = sum(slot.use is Use.FILLING for slot in self.slots)
        if filling + self._retiring + self._in_use_by_storage >= self.spare:
            return None
        return next(iter(self.all_free()), len(self.slots))

    def all_free(self) -> tuple[int, ...]:
        """Returns all existing free buffers."""
        return tuple(number for number, slot in enumerate(self.slots) if slot.free)

    def in_use(self) -> set[int]:
        """Returns the iterations of the snapshots that are being copied or that recovery needs."""
        in_use = (slot.iteration for slot in self.slots if slot.use in (Use.FILLING, Use.RECOVERY))
        return {iteration for iteration in in_use if iteration is not None}

    def holds(self, iteration: int) -> bool:
        """Returns whether a buffer contains the snapshot of an iteration, not given up."""
        return any(slot.iteration == iteration and not slot.free for slot in self.slots)

    def holding(self, iteration: int) -> int:
        """Returns the buffer of a snapshot that is not given up; if it is taken again, the new buffer.

        Raises:
            KeyError: there is none.
        """
        numbers = [number for number, slot in enumerate(self.slots) if slot.iteration == iteration and not slot.free]
        if not numbers:
            raise KeyError(iteration)
        return min(numbers, key=lambda number: _NEWEST_FIRST.index(self.slots[number].use))

    @property
    def recovery(self) -> int | None:
        """Iteration of the newest snapshot that all ranks have in memory."""
        iterations = (slot.iteration for slot in self.slots if slot.use is Use.RECOVERY)
        return max((iteration for iteration in iterations if iteration is not None), default=None)

    @property
    def persisting(self) -> bool:
        """Whether any buffer is being written to storage."""
        return any(slot.persisting for slot in self.slots)

    def committed(self) -> Rotation:
        """Records a commit all-reduce: every rank has done its earlier work, including commits of snapshots."""
        return self._each(
            lambda slot: replace(slot, use=Use.FREE, superseded_by=None) if slot.use is Use.RETIRING else slot
        )

    def begin(self, iteration: int, persisting: bool, supersedes: int | None) -> Rotation:
        """Records that a snapshot is being copied into the buffer that :meth:`free` returns."""
        number = self.free()
        assert number is not None  # the caller has waited for one
        return self._set(number, Slot(Use.FILLING, iteration, persisting, supersedes))

    def complete(self, iteration: int) -> Rotation:
        """Records that all ranks have copied a snapshot; superseded ones retire, including earlier copies of itself."""
        number = self.holding(iteration)
        if not self.keep:
            return self._set(number, replace(self.slots[number], use=Use.FREE))
        first = self.slots[number].supersedes

        def retired(slot: Slot) -> Slot:
            if slot.use is not Use.RECOVERY or slot.iteration is None:
                return slot
            if slot.iteration == iteration or first is not None and slot.iteration < first:
                return replace(slot, use=Use.RETIRING, superseded_by=iteration)
            return slot

        return self._each(retired)._set(number, replace(self.slots[number], use=Use.RECOVERY))

    def abandon(self, iteration: int) -> Rotation:
        """Retires a snapshot that some rank could not copy, and the others of its incomplete window."""
        number, window_end = self.holding(iteration), self.newest_end(iteration)

        def retired(slot: Slot) -> Slot:
            if slot.use is Use.RECOVERY and slot.iteration is not None and window_end < slot.iteration < iteration:
                return replace(slot, use=Use.RETIRING, superseded_by=iteration)
            return slot

        changed = replace(self.slots[number], use=Use.RETIRING, superseded_by=iteration)
        return self._each(retired)._set(number, changed)

    def newest_end(self, before: int) -> int:
        """Returns the iteration of the newest snapshot before another that ends a window and is not given up, or -1."""
        in_use = (slot for slot in self.slots if slot.use in (Use.FILLING, Use.RECOVERY))
        ends = (slot.iteration for slot in in_use if slot.supersedes is not None and slot.iteration is not None)
        return max((end for end in ends if end < before), default=-1)

    def persist(self, iteration: int) -> Rotation:
        """Records that every rank starts to write its part of a snapshot to storage."""
        number = self.holding(iteration)
        return self._set(number, replace(self.slots[number], persisting=True))

    def persisted(self, iteration: int) -> Rotation:
        """Records that every rank has written its part."""
        number = self.holding(iteration)
        return self._set(number, replace(self.slots[number], persisting=False))

    @property
    def _retiring(self) -> int:
        """Number of spare buffers that retiring ones count as.

        One commit all-reduce can complete several snapshots, and each may supersede others. Snapshots after the end of
        a window count, too: otherwise they would need buffers before the superseded window has released its own.
        """
        ends = {slot.superseded_by for slot in self.slots if slot.use is Use.RETIRING}
        newest = max((end for end in ends if end is not None), default=None)
        if newest is None:
            return len(ends)
        complete = (slot.iteration for slot in self.slots if slot.use is Use.RECOVERY)
        return len(ends) + sum(iteration is not None and iteration > newest for iteration in complete)

    @property
    def _in_use_by_storage(self) -> int:
        """Number of spare buffers that count as used only by storage."""
        count = sum(slot.use is Use.FREE and slot.persisting for slot in self.slots)
        return min(count, 1) if self.keep else count

    def max_buffers(self, window: int, kept: int) -> int:
        """Returns the maximum number of buffers for windows of this length; recovery needs up to ``kept`` snapshots."""
        return most_buffers(kept, window, self.spare, self.stores) if self.keep else self.spare

    def trimmed(self, max_buffers: int) -> Rotation:
        """Drops free buffers at the end until there are ``max_buffers``."""
        slots = self.slots
        while len(slots) > max_buffers and slots[-1].free:
            slots = slots[:-1]
        return replace(self, slots=slots)

    def _set(self, number: int, slot: Slot) -> Rotation:
        return replace(self, slots=(*self.slots[:number], slot, *self.slots[number + 1 :]))

    def _each(self, change) -> Rotation:
        return replace(self, slots=tuple(map(change, self.slots)))


class KeptBuffers:
    """Buffers of one worker between generations; not thread-safe."""

    def __init__(self):
        self._kept: list[HostBuffer] = []

    def keep(self, buffers: Iterable[HostBuffer]) -> None:
        """Takes over buffers that no thread reads or writes."""
        self._kept.extend(buffers)

    @property
    def paths(self) -> set[Path]:
        """Files of the buffers."""
        return {buffer.path for buffer in self._kept if buffer.path is not None}

    def keep_only(self, name: str) -> None:
        """Frees buffers whose files are not named after ``name``, such as buffers of this worker's previous rank."""
        unmatched = [buffer for buffer in self._kept if buffer.path is not None and buffer.path.stem != name]
        for buffer in unmatched:
            self._kept.remove(buffer)
            buffer.close()

    def committed_as(self, file: Path) -> HostBuffer | None:
        """Removes and returns the buffer that is also named ``file``, if there is one."""
        return self._give(next((buffer for buffer in self._kept if _is_same(buffer.path, file)), None))

    def take(self, nbytes: int, directory: Path | None) -> HostBuffer | None:
        """Removes and returns the smallest free buffer of at least ``nbytes`` bytes in a directory.

        Without a directory (None), the buffer is anonymous memory. If all are too small, it frees the largest, to make
        room, and returns None.
        """
        free = sorted(
            (buffer for buffer in self._kept if (buffer.path and buffer.path.parent) == directory and _is_free(buffer)),
            key=lambda buffer: buffer.nbytes,
        )
        fitting = next((buffer for buffer in free if buffer.nbytes >= nbytes), None)
        if fitting is None and free:
            self._kept.remove(free[-1])
            free[-1].close()
        return self._give(fitting)

    def trim(self, max_buffers: int) -> None:
        """Frees all but ``max_buffers`` buffers, unavailable ones first, then the smallest; committed files remain."""
        order = sorted(self._kept, key=lambda buffer: (not _is_free(buffer), -buffer.nbytes))
        self._kept, over = order[:max_buffers], order[max_buffers:]
        for buffer in over:
            buffer.close()

    def _give(self, buffer: HostBuffer | None) -> HostBuffer | None:
        if buffer is not None:
            self._kept.remove(buffer)
        return buffer


def _is_free(buffer: HostBuffer) -> bool:
    if buffer.path is None:
        return True
    try:
        return buffer.path.stat().st_nlink == 1
    except OSError:  # it was removed, so nothing could be committed from it
        return False


def _is_same(path: Path | None, file: Path) -> bool:
    try:
        return path is not None and os.path.samefile(path, file)
    except OSError:
        return False
