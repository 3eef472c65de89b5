"""Tracks storage: its failures and delays, the state that it has and lacks, and the snapshots written to it.

Decisions follow from commit all-reduces, so they are identical on all workers.  Clocks differ, so the all-reduces
include all states that depend on a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import NamedTuple

from moc.background import Trouble
from moc.errors import warning, with_code
from moc.policy import Capability, Load, Policy, SnapshotPlan, full_plan, recovers_exactly
from moc.recovery.inventory import Persisted, Promise, overdue
from moc.recovery.sources import STORAGE, AvailableCheckpoint, needed
from moc.session.engine import Listener
from moc.session.resume.point import ResumePoint
from moc.session.tiers import LOOKING_S
from moc.store.errors import CheckpointError, TakenError

LATE_AFTER = 100
"""Iterations that a snapshot may take to reach storage, if no ``--persist-interval`` is given."""

ALL_REDUCES = 3
"""Iterations whose commit all-reduces a snapshot takes: copied, written, committed."""

BEYOND = 2
"""Outstanding snapshots beyond the number of buffers; each waits for its manifest or its removal."""

OUTSTANDING = 4
"""Snapshots that may be on their way to storage at the same time without a memory tier: buffers and those beyond."""

_WAIT_S = 0.5
_LONG_S = 30.0


def may_begin(outstanding: int, buffers: int) -> bool:
    """Returns whether another snapshot may begin without a memory tier.

    At most ``buffers`` + :data:`BEYOND` are then outstanding: started, and neither committed nor abandoned.

    Args:
        outstanding: number of such snapshots.
        buffers: number of buffers.
    """
    return outstanding < buffers + BEYOND


def window_may_begin(is_writing: bool, ending: int) -> bool:
    """Returns whether a window, with a memory tier, may go to storage; otherwise it skips storage.

    At most one window and one snapshot are then outstanding, fewer than there are buffers.

    Args:
        is_writing: storage may lack a worker's part of an outstanding snapshot.
        ending: number of snapshots that wait for their manifest or their removal.
    """
    return not is_writing and ending < BEYOND


@dataclass(frozen=True)
class Lag:
    """Lag of storage behind training, in iterations.

    Attributes:
        age: iterations that would be repeated if all memory were lost.
        overdue: number of operators whose newest state in storage is older than the policy promises.
        operators: number of operators of the model.
        oldest: age of the oldest overdue operator; 0 if none is overdue.
    """

    age: int
    overdue: int
    operators: int
    oldest: int


def tolerable_error(future: Future) -> BaseException | None:
    """Returns the error that kept a snapshot from storage, unless it is a bug or another job owns the storage.

    Training may continue after such an error.
    """
    error = future.exception() if future.done() and not future.cancelled() else None
    is_storage = isinstance(error, (CheckpointError, OSError)) and not isinstance(error, TakenError)
    return error if is_storage else None


class StorageHealth:
    """Failures and delays of storage.

    Args:
        every: iterations between snapshots that go to storage in addition to a memory tier; None without such a tier,
            or for none.
        late_after: minimum iterations that a snapshot may be on its way before the next one counts as skipped.
        commit_delay: returns the iterations until a snapshot is committed if the write takes no time: all-reduces, and
            later snapshots of its window.
        newest: iteration of the newest snapshot in storage; None if there is none.
        prepare: starts to prepare storage in the background, on one worker; nothing is written there before.
        is_closed: some worker prepares storage.
    """

    def __init__(
        self,
        name: str,
        every: int | None,
        late_after: int,
        newest: int | None,
        log: Listener,
        prepare: Callable[[], Future] | None = None,
        commit_delay: Callable[[], int] = lambda: 0,
        is_closed: bool = True,
    ):
        self._commit_delay = commit_delay
        self._name, self.every, self._log = name, every, log
        self.newest, self._stored_at = newest, None
        self._due = every or 0
        self._late_after = every and max(every, late_after)
        self._missed: tuple[int | None, int] = None, 0
        self.failures = self.skipped = 0
        self._failing, self._late, self._waits, self._lags = Trouble(), Trouble(), Trouble(), Trouble()
        self._lag: Lag | None = None
        self._prepare, self._ready = prepare, None if prepare is None else prepare()
        self._prepare_started_at, self._is_silent = time.monotonic(), False
        self.is_suspended = False
        """Storage has failed, and is not used for a while."""
        self.closed = is_closed
        """Storage is not ready yet, as of the last all-reduce."""

    @property
    def late(self) -> bool:
        """Whether the pending write has taken so long that another snapshot was due."""
        return bool(self._late)

    def contribution(self) -> dict[str, float]:
        """Returns whether storage rests or is closed for this worker."""
        return {"storage_rests": float(self._failing.rests), "storage_closed": float(not self._is_ready())}

    def receive(self, totals: Mapping[str, float]) -> None:
        """Receives whether storage rests or is closed for any worker."""
        self.is_suspended, self.closed = totals["storage_rests"] > 0, totals["storage_closed"] > 0

    def is_due(self, iteration: int) -> bool:
        """Whether a snapshot of this iteration should go to storage."""
        return self.every is not None and iteration >= self._due

    def problem(self) -> str | None:
        """Returns the reason to end the job, or None."""
        if self._ready is None or not self._ready.done() or tolerable_error(self._ready):
            return None
        error = self._ready.exception()
        return with_code(error) if error else None

    def on_start(self, iteration: int) -> None:
        """Records that a snapshot starts on its way to storage."""
        if self.every is not None:
            self._due = (iteration // self.every + 1) * self.every

    def wait(self) -> None:
        """Waits for storage to be prepared, on the worker that prepares it, or for half a second."""
        if self._ready is not None:
            wait([self._ready], timeout=_WAIT_S)

    def on_wait(self, seconds: float) -> None:
        """Records that the run waits for pending snapshots; warns if that takes long."""
        if seconds > _LONG_S and self._waits.failed():
            self._log.events.write("storage_silent", where=self._name, waits=True)
            problem = f"the run has waited for {self._name} for {seconds:.0f} s"
            self._log.message(warning(f"{problem}; {self._newest_snapshot()}. Fix: repair it", code="storage-slow"))

    def on_iteration(self, iteration: int, pending: int | None) -> None:
        """Records a completed iteration; warns if a snapshot was due for storage while another is on its way there."""
        if pending is None or self._late_after is None:
            return
        missed = max(0, iteration - pending - self._commit_delay()) // self._late_after
        before = self._missed[1] if self._missed[0] == pending else 0
        if missed <= before:
            return
        self._missed = pending, missed
        self.skipped += 1
        age_s = self._age_s()
        self._log.events.write(
            "save_skipped", iteration=iteration, under_way=pending, newest=self.newest, age_s=age_s, where=self._name
        )
        if self._late.failed():
            self._log.message(
                warning(
                    f"{self._name} is slow: the snapshot of iteration {pending} is still being written there, and "
                    f"later ones are only in memory; {self._newest_snapshot()}. Fix: repair it, or raise "
                    "--persist-interval",
                    code="storage-slow",
                )
            )

    def on_lag(self, lag: Lag | None) -> None:
        """Records the lag after an iteration; warns if storage lacks state that the policy promises."""
        self._lag = lag
        if lag is None:
            return
        if lag.overdue and self._lags.failed():
            self._log.message(
                warning(
                    f"{self._name} lags behind: the newest state there of {lag.overdue} of {lag.operators} operators "
                    f"is older than the policy promises, and the oldest is {lag.oldest} iterations old. If all memory "
                    "were lost, the run would lose or repeat the updates since then; "
                    f"{self._newest_snapshot()}. Fix: use faster storage, or save fewer bytes",
                    code="storage-lags",
                )
            )
        elif not lag.overdue and self._lags:
            warned, seconds = self._lags.warned, self._lags.over()
            if warned:
                self._log.message(f"{self._name} has all state that the policy promises again, after {seconds:.0f} s")

    def on_failure(self, iteration: int, problem: str) -> None:
        """Records that a snapshot could not be saved to storage."""
        self.failures += 1
        if self.every is not None:
            self._due = iteration + 1  # as soon as a retry is allowed
        self._late.over()
        warns = self._failing.failed()
        self.is_suspended = True
        self._log.events.write(
            "save_failed",
            what="snapshot",
            iteration=iteration,
            reason=problem,
            failures=self.failures,
            lasted_s=round(self._failing.seconds, 3),
            newest=self.newest,
            age_s=self._age_s(),
        )
        if warns:
            lasted = f", for {self._failing.seconds:.0f} s now" if self._failing.seconds > 1 else ""
            self._log.message(
                f"WARNING: snapshots cannot be saved{lasted}, and training continues and tries again; "
                f"{self._newest_snapshot()}: {problem}"
            )

    def on_stored(self, newest: int | None) -> None:
        """Records a snapshot in storage, and the iteration that a run could resume from there; None if none."""
        for trouble, text in (
            (self._failing, "snapshots can be saved again, after {:.0f} s; " + f"{self.failures} could not be"),
            (self._late, f"{self._name} was slow for {{:.0f}} s; {self.skipped} snapshots were not written there"),
        ):
            warned, seconds = trouble.warned, trouble.over()
            if warned:
                self._log.message(text.format(seconds))
        self._waits.over()
        if newest != self.newest:
            self.newest, self._stored_at = newest, time.monotonic()
        self.is_suspended = False

    @property
    def gauges(self) -> dict[str, float]:
        """Counts of failed and skipped saves, if above 0; the lag of storage, if snapshots go there during the run."""
        counts = {"saves_failed": self.failures, "saves_skipped": self.skipped}
        values = {name: float(count) for name, count in counts.items() if count}
        if self._lag is not None:
            values |= {"storage_age": float(self._lag.age), "storage_overdue": float(self._lag.overdue)}
        return values

    def _is_ready(self) -> bool:
        if self._ready is None or self._prepare is None:
            return True
        if not self._ready.done():
            self._report_silence()
            return False
        error = tolerable_error(self._ready)
        if error is None:
            if self._ready.exception() is None:
                self._ready = None
            return self._ready is None
        if not self._failing.rests:
            if self._failing.failed():
                self._log.message(f"WARNING: {self._name} cannot be used, and training continues: {with_code(error)}")
            self._ready = self._prepare()
        return False

    def _report_silence(self) -> None:
        if self._is_silent or time.monotonic() - self._prepare_started_at < LOOKING_S:
            return
        self._is_silent = True
        self._log.events.write("storage_silent", where=self._name, waits=False)
        self._log.message(
            warning(
                f"{self._name} has not answered for {LOOKING_S:.0f} s: training continues, and no snapshot goes there "
                f"until it answers; {self._newest_snapshot()}. Fix: repair it",
                code="storage-silent",
            )
        )

    def _age_s(self) -> float | None:
        return None if self._stored_at is None else round(time.monotonic() - self._stored_at, 3)

    def _newest_snapshot(self) -> str:
        if self.newest is None:
            return "none was saved there since this start"
        age = f"{self._age_s():.0f} s old" if self._stored_at is not None else "from before this start"
        return f"the newest one there is of iteration {self.newest}, {age}"


class Planned(NamedTuple):
    """Plan of the save after an iteration.

    Attributes:
        plan: plan of the snapshot; None if none is taken.
        storage: the part of it that goes to storage; None if nothing does.
    """

    plan: SnapshotPlan | None = None
    storage: SnapshotPlan | None = None


class StorageTier:
    """State that storage has and lacks.

    Args:
        policy: plans snapshots, and which part of them goes to storage.
        health: failures and delays of storage.
        start: point where the run resumes.
        has_memory_tier: snapshots are durable in memory, and only some go to storage.

    Attributes:
        newest: iteration that a run could resume from if all memory were lost; None if there is none.
        newest_started: iteration of the newest started snapshot, in any tier; None if there is none.
        complete: that snapshot contains the entire state, and has not failed to become durable.
        problem: why the last snapshot for storage was not saved; empty if it was.
    """

    def __init__(self, policy: Policy, health: StorageHealth, start: ResumePoint, has_memory_tier: bool):
        self._policy, self.health, self._has_memory_tier = policy, health, has_memory_tier
        self._available = {
            checkpoint.iteration: checkpoint for checkpoint in start.stored if checkpoint.tier == STORAGE
        }
        self.persisted = Persisted.of(self._available.values(), policy)
        self.newest = self.persisted.iteration or (None if start.newest in start.in_memory else start.newest)
        has_more_state = start.experts or start.newer or start.before or len(start.in_memory) > 1
        self.newest_started, self.complete = start.newest, not has_more_state
        self.problem = ""
        self._storage_window_start: int | None = None  # first snapshot of the window that also goes to storage
        self._incomplete_window_start: int | None = None  # first snapshot of a window that storage lacks in part
        self._base_lost = self._base_requested = False  # storage lacks the full snapshot
        self._is_overdue = False  # storage, the only tier, lacks a snapshot that was due
        self._first_due: int | None = None  # iteration of the first snapshot that was due

    def request_base(self, iteration: int) -> None:
        """Requests, once, the full snapshot that partial ones need, if storage lacks it and can have it."""
        if self._lacks_base(iteration) and not (self._base_requested or self.health.is_suspended or self.health.closed):
            self._policy.storage.on_full_snapshot_lost()
            self._base_requested = True

    def plan(self, iteration: int, load: Load | None, has_room: bool) -> Planned:
        """Plans the snapshot of an iteration, and the part of it that goes to storage; changes nothing.

        Only this method and :meth:`part_of` decide that.  A snapshot that is due in storage stays due until storage
        takes it.  After a failed write, the next one is due as soon as storage may be tried again.

        Args:
            iteration: iterations completed.
            load: as in :meth:`Policy.plan`.
            has_room: storage may receive another snapshot, or another window.
        """
        if not self._has_memory_tier:
            if self._is_unavailable:
                return Planned()
            plan = self._policy.storage.plan(iteration, load, is_overdue=self._is_overdue)
            return Planned(plan, plan)
        accepts = self._accepts(iteration, has_room)
        plan = self._policy.storage.plan(iteration, load) if accepts else self._policy.plan(iteration, load)
        return Planned(plan, plan and self._part_of(plan, accepts))

    def part_of(self, plan: SnapshotPlan, has_room: bool) -> SnapshotPlan | None:
        """Returns the part that goes to storage of a snapshot that is taken again with its plan."""
        return self._part_of(plan, self._accepts(plan.iteration, has_room)) if self._has_memory_tier else plan

    def on_skipped_iteration(self, iteration: int, load: Load | None) -> None:
        """Records an iteration without a snapshot; a due snapshot that storage cannot accept stays due."""
        if self._has_memory_tier or not self._is_unavailable:
            return
        if Capability.WINDOWS in self._policy.requires:
            if self.health.closed:
                self._policy.schedule.restart_window()
            return
        self._is_overdue = self._is_overdue or self._policy.plan(iteration, load) is not None
        self._first_due = self._first_due or (iteration if self._is_overdue else None)

    def defer(self, plan: SnapshotPlan) -> bool:
        """Records that a snapshot that the policy counts as started cannot be repeated yet; returns False if it can."""
        if self._has_memory_tier or not self._is_unavailable:
            return False
        self._policy.schedule.restart_window()
        self._is_overdue, self._first_due = True, self._first_due or plan.iteration
        return True

    @property
    def _is_unavailable(self) -> bool:
        """Whether storage takes no snapshot now."""
        return self.health.is_suspended or self.health.closed

    @property
    def available(self) -> tuple[AvailableCheckpoint, ...]:
        """Checkpoints in storage that a run could resume from; identical on all workers."""
        return tuple(self._available.values())

    def on_start(self, plan: SnapshotPlan, storage: SnapshotPlan | None) -> None:
        """Records the start of a snapshot, with the part of it that goes to storage."""
        self.newest_started, self.complete, self._is_overdue = plan.iteration, plan.complete, False
        self._first_due = self._first_due or plan.iteration
        if not self._has_memory_tier:
            return
        if storage is not None and plan.since == plan.iteration:
            self.health.on_start(plan.iteration)
            self._storage_window_start = plan.since
        elif plan.complete:
            self._base_requested = False

    def _accepts(self, iteration: int, has_room: bool) -> bool:
        """Whether storage takes a snapshot or a window that begins now, if there is a memory tier."""
        due = self._lacks_base(iteration) or self.health.is_due(iteration)
        return due and has_room and not (self.health.is_suspended or self.health.closed)

    def _part_of(self, plan: SnapshotPlan, accepts: bool) -> SnapshotPlan | None:
        """Returns the part of a snapshot that goes to storage, where a window goes from its start or not at all."""
        is_usable = plan.complete or not self._lacks_base(plan.iteration)
        starts_window = accepts and is_usable and plan.since == plan.iteration
        return self._policy.storage.part_of(plan) if starts_window or self._storage_window_start == plan.since else None

    def on_committed(self, plan: SnapshotPlan) -> None:
        """Records that storage has its part of a snapshot."""
        self.problem, iteration = "", plan.iteration
        self._base_lost = self._base_lost and not plan.complete
        self._policy.storage.on_write_ended(plan, committed=True)
        details = {name: detail.value for name, detail in plan.operators.items()}
        self._available[iteration] = AvailableCheckpoint(iteration, STORAGE, details, self._policy.name)
        self.persisted = Persisted.of(self._available.values(), self._policy)
        needed_keys = needed(self._available.values(), self._policy.operators, recovers_exactly(self._policy), keep=1)
        self._available = {
            checkpoint.iteration: checkpoint for checkpoint in self._available.values() if checkpoint.key in needed_keys
        }
        self.newest = self.persisted.iteration or None
        self.health.on_stored(self.newest)

    def holds(self, iteration: int) -> bool:
        """Whether storage holds a snapshot of an iteration, complete or partial; identical on all workers."""
        return iteration in self._available

    def on_removed(self, iteration: int) -> None:
        """Records that storage no longer has a snapshot."""
        if self._available.pop(iteration, None) is not None:
            self.persisted = Persisted.of(self._available.values(), self._policy)
            self.newest = self.persisted.iteration or None

    def on_failure(self, plan: SnapshotPlan, storage: SnapshotPlan, in_memory: bool) -> None:
        """Records that a snapshot could not be saved to storage, because of :attr:`problem`.

        Args:
            plan: plan of the snapshot.
            storage: the part of it that was to go to storage.
            in_memory: it also goes to the memory tier, if there is one.
        """
        self._policy.storage.on_write_ended(storage, committed=False)
        self.health.on_failure(plan.iteration, self.problem)
        self._is_overdue = not self._has_memory_tier
        if plan.iteration == self.newest_started and not (self._has_memory_tier and in_memory):
            self.complete = False
        self._incomplete_window_start, self._storage_window_start = plan.since, None
        if not recovers_exactly(self._policy) and storage.complete:
            self._base_lost, self._base_requested = True, False
        if not self._has_memory_tier:
            self._policy.schedule.restart_window()

    def on_abandoned(self, plan: SnapshotPlan) -> None:
        """Records that some rank lacked memory for a snapshot, so that no tier has it."""
        if plan.iteration == self.newest_started:
            self.complete = False

    def is_window_incomplete(self, plan: SnapshotPlan) -> bool:
        """Whether storage lacks an earlier snapshot of the same window."""
        return plan.since == self._incomplete_window_start

    @property
    def memory_is_free(self) -> bool:
        """Whether a memory tier exists and holds nothing that storage lacks; identical on all workers."""
        return self._has_memory_tier and self.newest_started == self.newest

    def has(self, iteration: int) -> bool:
        """Whether storage has all state that was computed up to an iteration."""
        return iteration == 0 or (self.newest == self.newest_started and self.complete)

    def lag(self, iteration: int) -> Lag | None:
        """Returns the lag of storage behind training; None if only a run's first and last snapshot go there."""
        every = self.health.every if self._has_memory_tier else self._policy.schedule.snapshot_interval
        if every is None:
            return None
        promise = Promise.of(self._policy, every, 1 if self._has_memory_tier else OUTSTANDING, ALL_REDUCES)
        operators, since = self._policy.operators, iteration if self._first_due is None else self._first_due
        overdue_operators = overdue(self.persisted, promise, operators, iteration, since)
        oldest = min((self.persisted.learned.get(name, 0) for name in overdue_operators), default=iteration)
        return Lag(iteration - self.persisted.iteration, len(overdue_operators), len(operators), iteration - oldest)

    def _lacks_base(self, iteration: int) -> bool:
        """Whether storage, in addition to a memory tier, lacks the full snapshot that partial ones need."""
        return self._has_memory_tier and (
            self._base_lost or self._policy.storage.needs(full_plan(self._policy, iteration))
        )
