"""Which buffer may be written to, so that one complete snapshot exists at every moment (MoC-System, section 5.2).

A state machine without side effects.  All ranks feed it with the same events in the same order, since what only one of
them knows reaches the others by the vote of each iteration; so all have the same answer to whether a buffer is free.

    FREE -> FILLING -> RECOVERY -> RETIRING -> FREE

* FILLING: being copied into; no rank knows yet whether all have it.
* RECOVERY: all ranks have this snapshot, and nothing that is newer supersedes it.
* RETIRING: a newer one does, but the rank that publishes that one may be about to; with the next vote it has.

A snapshot of everything supersedes all that were before it.  One of a window (MoEvement, section 3.2) does only if it
is the last of its window, and then all that were before the first one; so the newest whole window stays, and all of the
one that is under way.

A buffer that is being written to storage is not free either, whatever else it is.  Where memory keeps what is needed,
the caller brings one state at a time there, a snapshot or a window: so there is always another buffer beside those of
that state, however long storage takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum


class Use(Enum):
    """What a buffer is used for."""

    FREE = "free"
    FILLING = "filling"
    RECOVERY = "recovery"
    RETIRING = "retiring"


@dataclass(frozen=True)
class Slot:
    """One buffer.

    Attributes:
        use: what it is used for, apart from being written to storage.
        iteration: of the snapshot that it holds.
        persisting: it is being written to storage, by this rank or another.
        supersedes: when all ranks have it, snapshots before this iteration are not needed; None if they are.
    """

    use: Use = Use.FREE
    iteration: int | None = None
    persisting: bool = False
    supersedes: int | None = None

    @property
    def free(self) -> bool:
        """Whether it may be written to."""
        return self.use is Use.FREE and not self.persisting


@dataclass(frozen=True)
class Rotation:
    """The buffers of every rank alike: those of what is needed to recover, and a few more.

    Attributes:
        slots: the buffers; they become more as they are needed.
        spare: how many may be in use beside those that are needed to recover; what retires together counts as one, and
            so does what only storage still needs.
        keep: what is needed to recover stays in memory; if not, storage has it, and memory need not.
    """

    slots: tuple[Slot, ...]
    spare: int
    keep: bool

    @classmethod
    def of(cls, spare: int, keep: bool, recovered: Iterable[int] = ()) -> Rotation:
        """No buffers yet but those that stand for snapshots which an earlier job has left in memory."""
        return cls(tuple(Slot(Use.RECOVERY, iteration) for iteration in recovered) if keep else (), spare, keep)

    def free(self) -> int | None:
        """A buffer that may be written to, or None; the lowest number, which may be that of a new one."""
        filling = sum(slot.use is Use.FILLING for slot in self.slots)
        retiring = any(slot.use is Use.RETIRING for slot in self.slots)
        if filling + retiring + self._held >= self.spare:
            return None
        return next(iter(self.all_free()), len(self.slots))

    def all_free(self) -> tuple[int, ...]:
        """All buffers that hold nothing which is needed."""
        return tuple(number for number, slot in enumerate(self.slots) if slot.free)

    def holds(self, iteration: int) -> bool:
        """Whether there is a buffer of a snapshot that has not been given up."""
        return any(slot.iteration == iteration and not slot.free for slot in self.slots)

    def holding(self, iteration: int) -> int:
        """The buffer of a snapshot that has not been given up.

        Raises:
            KeyError: there is none.
        """
        for number, slot in enumerate(self.slots):
            if slot.iteration == iteration and not slot.free:
                return number
        raise KeyError(iteration)

    @property
    def recovery(self) -> int | None:
        """Iteration of the newest snapshot that all ranks have in memory."""
        held = (slot.iteration for slot in self.slots if slot.use is Use.RECOVERY)
        return max((iteration for iteration in held if iteration is not None), default=None)

    @property
    def persisting(self) -> bool:
        """Whether any buffer is being written to storage."""
        return any(slot.persisting for slot in self.slots)

    def voted(self) -> Rotation:
        """A vote has passed: every rank has done what it had to do before, publishing included."""
        return self._each(lambda slot: replace(slot, use=Use.FREE) if slot.use is Use.RETIRING else slot)

    def begin(self, iteration: int, persisting: bool, supersedes: int | None) -> Rotation:
        """A snapshot is being copied into the buffer that :meth:`free` names."""
        number = self.free()
        assert number is not None  # the caller has waited for one
        return self._set(number, Slot(Use.FILLING, iteration, persisting, supersedes))

    def complete(self, iteration: int) -> Rotation:
        """All ranks have copied a snapshot; what it supersedes need not be kept much longer."""
        number = self.holding(iteration)
        if not self.keep:
            return self._set(number, replace(self.slots[number], use=Use.FREE))
        first = self.slots[number].supersedes

        def retired(slot: Slot) -> Slot:
            if slot.use is Use.RECOVERY and first is not None and slot.iteration is not None and slot.iteration < first:
                return replace(slot, use=Use.RETIRING)
            return slot

        return self._each(retired)._set(number, replace(self.slots[number], use=Use.RECOVERY))

    def persist(self, iteration: int) -> Rotation:
        """Every rank begins to write its part of a snapshot to storage."""
        number = self.holding(iteration)
        return self._set(number, replace(self.slots[number], persisting=True))

    def persisted(self, iteration: int) -> Rotation:
        """Every rank has written its part."""
        number = self.holding(iteration)
        return self._set(number, replace(self.slots[number], persisting=False))

    @property
    def _held(self) -> int:
        """For how many buffers those count that storage alone still needs."""
        held = sum(slot.use is Use.FREE and slot.persisting for slot in self.slots)
        return min(held, 1) if self.keep else held

    def most(self, window: int) -> int:
        """How many buffers there ever are with windows of so many snapshots, one of which storage may hold."""
        return 3 * window + self.spare - 2 if self.keep else self.spare

    def needs(self, window: int) -> int:
        """How many of them are of use now: those for what storage holds are, as long as it does."""
        return self.most(window) - (window - 1 if self.keep and not self._held else 0)

    def trimmed(self, window: int) -> Rotation:
        """Without free buffers at the end that windows of so many snapshots do not need now."""
        slots = self.slots
        while len(slots) > self.needs(window) and slots[-1].free:
            slots = slots[:-1]
        return replace(self, slots=slots)

    def _set(self, number: int, slot: Slot) -> Rotation:
        return replace(self, slots=(*self.slots[:number], slot, *self.slots[number + 1 :]))

    def _each(self, change) -> Rotation:
        return replace(self, slots=tuple(map(change, self.slots)))
