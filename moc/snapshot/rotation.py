"""Which buffer may be written to, so that one complete snapshot exists at every moment (MoC-System, section 5.2).

A state machine without side effects.  All ranks feed it with the same events in the same order, since what only one of
them knows reaches the others by the vote of each iteration; so all have the same answer to whether a buffer is free.

    FREE -> FILLING -> RECOVERY -> RETIRING -> FREE

* FILLING: being copied into; no rank knows yet whether all have it.
* RECOVERY: all ranks have this snapshot, and there is none that is newer.
* RETIRING: a newer one is complete, but the rank that publishes it may be about to; with the next vote it has.

A buffer that is being written to storage is not free either, whatever else it is.
"""

from __future__ import annotations

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
    """

    use: Use = Use.FREE
    iteration: int | None = None
    persisting: bool = False

    @property
    def free(self) -> bool:
        """Whether it may be written to."""
        return self.use is Use.FREE and not self.persisting


@dataclass(frozen=True)
class Rotation:
    """The buffers of every rank alike.

    Attributes:
        slots: the buffers.
        keep: the newest complete snapshot stays in memory; if not, storage has it, and memory need not.
    """

    slots: tuple[Slot, ...]
    keep: bool

    @classmethod
    def of(cls, count: int, keep: bool, recovered: int | None = None) -> Rotation:
        """Empty buffers; with ``recovered`` the first one stands for a snapshot that an earlier job left in memory."""
        slots = [Slot()] * count
        if keep and recovered is not None:
            slots[0] = Slot(Use.RECOVERY, recovered)
        return cls(tuple(slots), keep)

    def free(self) -> int | None:
        """A buffer that may be written to, or None; the lowest number."""
        return next((number for number, slot in enumerate(self.slots) if slot.free), None)

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
        return next((slot.iteration for slot in self.slots if slot.use is Use.RECOVERY), None)

    @property
    def persisting(self) -> bool:
        """Whether any buffer is being written to storage."""
        return any(slot.persisting for slot in self.slots)

    def voted(self) -> Rotation:
        """A vote has passed: every rank has done what it had to do before, publishing included."""
        return self._each(lambda slot: replace(slot, use=Use.FREE) if slot.use is Use.RETIRING else slot)

    def begin(self, iteration: int, persisting: bool) -> Rotation:
        """A snapshot is being copied into the buffer that :meth:`free` names."""
        return self._set(self.free(), Slot(Use.FILLING, iteration, persisting))

    def complete(self, iteration: int) -> Rotation:
        """All ranks have copied a snapshot; the one before need not be kept much longer."""
        number = self.holding(iteration)
        if not self.keep:
            return self._set(number, replace(self.slots[number], use=Use.FREE))
        retired = self._each(lambda slot: replace(slot, use=Use.RETIRING) if slot.use is Use.RECOVERY else slot)
        return retired._set(number, replace(self.slots[number], use=Use.RECOVERY))

    def persist(self, iteration: int) -> Rotation:
        """Every rank begins to write its part of a snapshot to storage."""
        number = self.holding(iteration)
        return self._set(number, replace(self.slots[number], persisting=True))

    def persisted(self, iteration: int) -> Rotation:
        """Every rank has written its part."""
        number = self.holding(iteration)
        return self._set(number, replace(self.slots[number], persisting=False))

    def _set(self, number: int, slot: Slot) -> Rotation:
        return replace(self, slots=(*self.slots[:number], slot, *self.slots[number + 1 :]))

    def _each(self, change) -> Rotation:
        return replace(self, slots=tuple(map(change, self.slots)))
