"""What storage has of a run and still lacks, and so which snapshots go there.

Everything follows from votes, so it is identical on all workers.
"""

from __future__ import annotations

from moc.policy import Policy, SnapshotPlan
from moc.session.queues import Taken
from moc.session.resume.point import ResumePoint
from moc.session.storage_health import StorageHealth


class Stored:
    """What storage has and lacks.

    Args:
        policy: plans snapshots, and which part of them goes to storage.
        health: of storage.
        start: where the run resumes.
        beside: memory makes snapshots safe, and only some go to storage.

    Attributes:
        newest: iteration of the newest snapshot that storage has, with all that it depends on; None if there is none.
        begun: iteration of the newest snapshot, in any tier; None if there is none.
        complete: that snapshot is the whole state by itself, and has not failed to become safe.
        problem: why the last snapshot meant for storage did not get there; empty if it did.
    """

    def __init__(self, policy: Policy, health: StorageHealth, start: ResumePoint, beside: bool):
        self._policy, self._health, self._beside = policy, health, beside
        self.newest = None if start.newest in start.in_memory else start.newest
        others = start.experts or start.newer or start.before or len(start.in_memory) > 1
        self.begun, self.complete = start.newest, not others
        self.problem = ""
        self._goes_since: int | None = None  # first snapshot of the window that also goes to storage
        self._broken_since: int | None = None  # first snapshot of a window that storage lacks in part
        self._base_lost = self._base_asked = False  # storage lacks the full snapshot

    def ask_for_base(self, iteration: int) -> None:
        """Asks the policy, once, for the full snapshot that partial ones need, if storage lacks it and can have it."""
        if self._lacks_base(iteration) and not (self._base_asked or self._health.rests or self._health.closed):
            self._policy.storage_lost()
            self._base_asked = True

    def part_of(self, plan: SnapshotPlan, has_room: bool) -> SnapshotPlan | None:
        """Returns the part of a new snapshot that goes to storage; a window goes there from its first one on."""
        if not self._beside:
            return plan
        wanted = plan.complete if self._lacks_base(plan.iteration) else self._health.is_due(plan.iteration)
        may = has_room and not (self._health.rests or self._health.closed)
        if plan.since == plan.iteration and wanted and may:
            self._health.begins(plan.iteration)
            self._goes_since = plan.since
        elif plan.complete:
            self._base_asked = False
        return self._policy.for_storage(plan) if self._goes_since == plan.since else None

    def begins(self, plan: SnapshotPlan) -> None:
        """A snapshot starts, in any tier."""
        self.begun, self.complete = plan.iteration, plan.complete

    def published(self, taken: Taken) -> None:
        """A snapshot is in storage."""
        self.problem = ""
        self._base_lost = self._base_lost and not (taken.storage and taken.storage.complete)
        if not self._base_lost:
            self.newest = taken.plan.iteration
        self._health.on_stored(taken.plan.iteration)

    def failed(self, taken: Taken) -> None:
        """A snapshot could not be saved to storage, because of :attr:`problem`."""
        self._health.failed(taken.plan.iteration, self.problem)
        if taken.plan.iteration == self.begun and not (self._beside and taken.snapshot.in_memory):
            self.complete = False
        self._broken_since, self._goes_since = taken.plan.since, None
        if not self._policy.exact and taken.storage and taken.storage.complete:
            self._base_lost, self._base_asked = True, False
        if not self._beside:
            self._policy.begin_anew()

    def abandoned(self, plan: SnapshotPlan) -> None:
        """Some rank lacked memory for a snapshot, so that no tier has it."""
        if plan.iteration == self.begun:
            self.complete = False

    def is_broken(self, plan: SnapshotPlan) -> bool:
        """Whether storage lacks an earlier snapshot of the same window."""
        return plan.since == self._broken_since

    def has(self, iteration: int) -> bool:
        """Whether storage has everything that was computed up to an iteration."""
        return iteration == 0 or (self.newest == self.begun and self.complete)

    def _lacks_base(self, iteration: int) -> bool:
        """Whether storage, beside a memory tier, lacks the full snapshot that partial ones need."""
        return self._beside and (self._base_lost or self._policy.stores(self._policy.everything(iteration)))
