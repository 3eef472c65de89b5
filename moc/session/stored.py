"""Tracks the state that storage has and lacks, and decides which snapshots go there.

Everything follows from commit all-reduces, so it is identical on all workers.
"""

from __future__ import annotations

from typing import NamedTuple

from moc.policy import Capability, Load, Policy, SnapshotPlan, full_plan, recovers_exactly
from moc.recovery.persisted import Persisted, Promise, overdue
from moc.recovery.sources import STORAGE, AvailableCheckpoint, needed
from moc.session.queues import Taken
from moc.session.resume.point import ResumePoint
from moc.session.storage_health import VOTES, Lag, StorageHealth

OUTSTANDING = 4
"""Snapshots that may be on their way to storage at the same time without a memory tier: buffers and those beyond."""


class Planned(NamedTuple):
    """Plan of the save after an iteration.

    Attributes:
        plan: plan of the snapshot; None if none is taken.
        storage: the part of it that goes to storage; None if nothing does.
    """

    plan: SnapshotPlan | None = None
    storage: SnapshotPlan | None = None


class Stored:
    """State that storage has and lacks.

    Args:
        policy: plans snapshots, and which part of them goes to storage.
        health: health of storage.
        start: point where the run resumes.
        beside: snapshots are durable in memory, and only some go to storage.

    Attributes:
        newest: iteration that a run could resume from if all memory were lost; None if there is none.
        begun: iteration of the newest snapshot, in any tier; None if there is none.
        complete: that snapshot contains the entire state, and has not failed to become durable.
        problem: why the last snapshot meant for storage did not get there; empty if it did.
    """

    def __init__(self, policy: Policy, health: StorageHealth, start: ResumePoint, beside: bool):
        self._policy, self._health, self._beside = policy, health, beside
        self._held = {one.iteration: one for one in start.stored if one.tier == STORAGE}
        self.persisted = Persisted.of(self._held.values(), policy)
        self.newest = self.persisted.iteration or (None if start.newest in start.in_memory else start.newest)
        others = start.experts or start.newer or start.before or len(start.in_memory) > 1
        self.begun, self.complete = start.newest, not others
        self.problem = ""
        self._goes_since: int | None = None  # first snapshot of the window that also goes to storage
        self._broken_since: int | None = None  # first snapshot of a window that storage lacks in part
        self._base_lost = self._base_asked = False  # storage lacks the full snapshot
        self._owed = False  # storage, the only tier, lacks a snapshot that was due
        self._first: int | None = None  # iteration of the first snapshot that was due

    def ask_for_base(self, iteration: int) -> None:
        """Requests, once, the full snapshot that partial ones need, if storage lacks it and can have it."""
        if self._lacks_base(iteration) and not (self._base_asked or self._health.rests or self._health.closed):
            self._policy.storage.on_full_snapshot_lost()
            self._base_asked = True

    def plan(self, iteration: int, load: Load | None, has_room: bool) -> Planned:
        """Plans the snapshot of an iteration, and the part of it that goes to storage; changes nothing.

        Only this method and :meth:`part_of` decide that.  A snapshot that is due in storage stays due until storage
        takes it.  After a failed write, the next one is due as soon as storage may be tried again.

        Args:
            iteration: iterations completed.
            load: as in :meth:`Policy.plan`.
            has_room: storage may receive another snapshot, or another window.
        """
        if not self._beside:
            if self._health.rests:
                return Planned()
            plan = self._policy.storage.plan(iteration, load, again=self._owed)
            return Planned(plan, plan)
        takes = self._takes(iteration, has_room)
        plan = self._policy.storage.plan(iteration, load) if takes else self._policy.plan(iteration, load)
        return Planned(plan, plan and self._part_of(plan, takes))

    def part_of(self, plan: SnapshotPlan, has_room: bool) -> SnapshotPlan | None:
        """Returns the part that goes to storage of a snapshot that is taken again with its plan."""
        return self._part_of(plan, self._takes(plan.iteration, has_room)) if self._beside else plan

    def passes(self, iteration: int, load: Load | None) -> None:
        """Records that no snapshot is taken after an iteration; storage owes one if it rests and one was due."""
        if not self._beside and self._health.rests and Capability.WINDOWS not in self._policy.requires:
            self._owed = self._owed or self._policy.plan(iteration, load) is not None
            self._first = self._first or (iteration if self._owed else None)

    def begins(self, plan: SnapshotPlan, storage: SnapshotPlan | None) -> None:
        """Records the start of a snapshot, with the part of it that goes to storage."""
        self.begun, self.complete, self._owed = plan.iteration, plan.complete, False
        self._first = self._first or plan.iteration
        if not self._beside:
            return
        if storage is not None and plan.since == plan.iteration:
            self._health.begins(plan.iteration)
            self._goes_since = plan.since
        elif plan.complete:
            self._base_asked = False

    def _takes(self, iteration: int, has_room: bool) -> bool:
        """Whether storage takes a snapshot or a window that begins now, if there is a memory tier."""
        due = self._lacks_base(iteration) or self._health.is_due(iteration)
        return due and has_room and not (self._health.rests or self._health.closed)

    def _part_of(self, plan: SnapshotPlan, takes: bool) -> SnapshotPlan | None:
        """Returns the part of a snapshot that goes to storage, where a window goes from its start or not at all."""
        is_of_use = plan.complete or not self._lacks_base(plan.iteration)
        begins = takes and is_of_use and plan.since == plan.iteration
        return self._policy.storage.part_of(plan) if begins or self._goes_since == plan.since else None

    def published(self, taken: Taken) -> None:
        """Records that a snapshot is in storage."""
        assert taken.storage is not None  # it was written
        self.problem, iteration = "", taken.plan.iteration
        self._base_lost = self._base_lost and not taken.storage.complete
        self._policy.storage.on_write_ended(taken.storage, committed=True)
        details = {name: detail.value for name, detail in taken.storage.operators.items()}
        self._held[iteration] = AvailableCheckpoint(iteration, STORAGE, details, self._policy.name)
        self.persisted = Persisted.of(self._held.values(), self._policy)
        of_use = needed(self._held.values(), self._policy.operators, recovers_exactly(self._policy), keep=1)
        self._held = {one.iteration: one for one in self._held.values() if one.key in of_use}
        self.newest = self.persisted.iteration or None
        self._health.on_stored(self.newest)

    def failed(self, taken: Taken) -> None:
        """Records that a snapshot could not be saved to storage, because of :attr:`problem`."""
        assert taken.storage is not None  # it was to be written
        self._policy.storage.on_write_ended(taken.storage, committed=False)
        self._health.failed(taken.plan.iteration, self.problem)
        self._owed = not self._beside
        if taken.plan.iteration == self.begun and not (self._beside and taken.snapshot.in_memory):
            self.complete = False
        self._broken_since, self._goes_since = taken.plan.since, None
        if not recovers_exactly(self._policy) and taken.storage.complete:
            self._base_lost, self._base_asked = True, False
        if not self._beside:
            self._policy.schedule.restart_window()

    def abandoned(self, plan: SnapshotPlan) -> None:
        """Records that some rank lacked memory for a snapshot, so that no tier has it."""
        if plan.iteration == self.begun:
            self.complete = False

    def is_broken(self, plan: SnapshotPlan) -> bool:
        """Whether storage lacks an earlier snapshot of the same window."""
        return plan.since == self._broken_since

    def has(self, iteration: int) -> bool:
        """Whether storage has all state that was computed up to an iteration."""
        return iteration == 0 or (self.newest == self.begun and self.complete)

    def lag(self, iteration: int) -> Lag | None:
        """Returns the lag of storage behind training; None if only a run's first and last snapshot go there."""
        every = self._health.every if self._beside else self._policy.schedule.iterations_apart
        if every is None:
            return None
        promise = Promise.of(self._policy, every, 1 if self._beside else OUTSTANDING, VOTES)
        operators, since = self._policy.operators, iteration if self._first is None else self._first
        late = overdue(self.persisted, promise, operators, iteration, since)
        oldest = min((self.persisted.learned.get(name, 0) for name in late), default=iteration)
        return Lag(iteration - self.persisted.iteration, len(late), len(operators), iteration - oldest)

    def _lacks_base(self, iteration: int) -> bool:
        """Whether storage, in addition to a memory tier, lacks the full snapshot that partial ones need."""
        return self._beside and (self._base_lost or self._policy.storage.needs(full_plan(self._policy, iteration)))
