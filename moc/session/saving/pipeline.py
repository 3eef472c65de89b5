"""Saves snapshots in the background, to memory and from there to storage (MoC-System, section 5.2).

A pipeline of stages saves a snapshot.  Each worker has all stages, with the same snapshots in the same order.

    copying         if the policy plans a snapshot: wait for a free buffer, and start to copy into it
                    gradients: copy them to a second buffer first, since the next iteration clears them
    replicating     copied by all: commit it in memory, where it is durable (with peers: once all nodes have copies);
                    superseded snapshots are released one all-reduce later
    writing         for storage: write it once it is finalized
    committing      written by all: commit it in storage
    removing        a snapshot that cannot be saved to storage: remove its files

    before apply    wait for copies of the state that the update changes, and for snapshots that lag too far behind
    abandoned       a worker lacks memory for a snapshot: the previous one stays
    flush           begin a snapshot of unsaved state, and write it to storage

Waits count as stalls.  The commit all-reduce of each iteration carries the progress of every worker, so no collective
is added.  Buffers rotate identically on all workers (:mod:`moc.snapshot.buffer_pool`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import Any

from moc.errors import code_of, with_code
from moc.policy import Capability, Policy, SnapshotPlan, check_plan, full_plan, recovers_exactly
from moc.runtime.collectives import first_reported, run_on_rank0, sum_over_workers
from moc.session.components import Components
from moc.session.engine import Listener
from moc.session.resume.point import ResumePoint
from moc.session.resume.resuming import tidy_storage
from moc.session.saving.committing import Failure, SnapshotInProgress, copy_to_storage
from moc.session.saving.memory_tier import MemoryTier, Reservation
from moc.session.saving.stages import POSITIONS, Committing, Copying, Removing, Replicating, Stage, Writing
from moc.session.saving.storage import (
    ALL_REDUCES,
    LATE_AFTER,
    StorageHealth,
    StorageTier,
    may_begin,
    window_may_begin,
)
from moc.session.settings import Settings
from moc.state.record import Position, StepRecord
from moc.store.errors import CheckpointError, TakenError

RETRIES_S = (0.5, 2.0)
"""Pauses, in seconds, before repeated writes of a snapshot that others of its window depend on."""

LAST_TRIES_S = (1.0, 2.0, 4.0)
"""Pauses, in seconds, between attempts to save the last state to storage."""

_WAIT_S = 0.5

Describer = Callable[[Position, StepRecord | None], dict]
"""Returns the non-tensor state at a position, given the record of the iteration that led to it."""


@dataclass(frozen=True)
class Stages:
    """Stages of the pipeline.

    Attributes:
        copying: some worker may not have copied its part of a snapshot yet.
        replicating: some node may not have its copies yet.
        writing: some worker's part may not be in storage yet.
        committing: all parts are in storage, but the manifest may not be.
        removing: could not be saved to storage, where files may remain.
        has_memory_tier: snapshots are durable in memory; otherwise in storage.
    """

    copying: Copying
    replicating: Replicating
    writing: Writing
    committing: Committing
    removing: Removing
    has_memory_tier: bool

    def __iter__(self) -> Iterator[Stage]:
        return iter((self.copying, self.replicating, self.writing, self.committing, self.removing))

    def progress(self) -> dict[str, float]:
        """Returns this worker's entries of the commit all-reduce, by position; :func:`totals_at` is the inverse."""
        each = [stage.progress() for stage in self]
        return {
            f"{name}[{place}]": value
            for place in range(POSITIONS)
            for of_stage in each
            for name, value in of_stage[place].items()
        }

    def advance(self, totals: Mapping[str, float]) -> None:
        """Receives the totals: each snapshot whose work is done on all workers leaves its stage."""
        for place in range(POSITIONS):
            of_place = totals_at(totals, place)
            for stage in self:
                stage.advance(of_place)

    def failure(self) -> str | None:
        """Returns the error on this worker that must end the run, if any."""
        return next(filter(None, (stage.failure() for stage in self)), None)

    def wait(self, for_storage: bool) -> None:
        """Waits for progress of this worker; waits for other nodes and for storage are short.

        Storage may hang, and is waited for only if the caller cannot continue without it (``for_storage``).
        """
        first = {stage: stage.work(stage.queue[0]) for stage in self if stage.queue}
        if self.copying in first:
            wait([first[self.copying]])
        elif self.replicating in first:  # only the all-reduce reports a lost node
            wait([first[self.replicating]], timeout=_WAIT_S)
        elif for_storage:
            pending = [work for work in first.values() if not work.done()]
            wait(pending, timeout=_WAIT_S, return_when=FIRST_COMPLETED)

    @property
    def is_empty(self) -> bool:
        """Whether every snapshot is committed in each of its tiers."""
        return not any(stage.queue for stage in self)

    @property
    def to_storage(self) -> list[SnapshotInProgress]:
        """Snapshots on their way to storage, the oldest first."""
        return [*self.committing.queue, *self.writing.queue]

    @property
    def not_in_memory(self) -> list[SnapshotInProgress]:
        """Snapshots that are not durable in memory yet; without a memory tier, that are being copied."""
        return [*self.copying.queue, *self.replicating.queue]

    @property
    def not_durable(self) -> list[SnapshotInProgress]:
        """Snapshots that may still be lost."""
        return self.not_in_memory + ([] if self.has_memory_tier else self.to_storage)

    def is_lagging(self, iteration: int, most: int | None) -> bool:
        """Whether a snapshot that is not durable lags at least ``most`` iterations behind; None for no limit."""
        return most is not None and any(iteration - snapshot.iteration >= most for snapshot in self.not_durable)

    @property
    def outstanding(self) -> int:
        """Number of snapshots for storage that have begun, and are neither committed nor removed.

        Storage may have files of them.  They count from their beginning, before their copies are done.
        """
        return len(self.removing.queue) + len(self.to_storage)

    def have_room(self, reservation: Reservation) -> bool:
        """Whether a snapshot may begin now; with a memory tier, storage does not matter."""
        rotation = reservation.rotation
        lags = not self.has_memory_tier and not may_begin(self.outstanding, rotation.spare)
        return rotation.free() is not None and not lags

    @property
    def window_may_begin(self) -> bool:
        """Whether storage may receive another snapshot or window, if there is a memory tier.

        Storage receives one at a time, which keeps its buffers until it is written.
        """
        writing = len(self.writing.queue)
        return window_may_begin(writing > 0, self.outstanding - writing)


def totals_at(totals: Mapping[str, float], place: int) -> dict[str, float]:
    """Returns the totals for the snapshots at a position of their queues when the all-reduce started."""
    return {name.removesuffix(f"[{place}]"): value for name, value in totals.items() if name.endswith(f"[{place}]")}


class SavingPipeline:
    """Copies, replicates, writes and commits the snapshots of one worker, in stages that run in the background.

    A snapshot enters the next stage when a commit all-reduce has shown that all workers have finished this one.
    Every worker calls every method except :meth:`close`.  Every method may raise CheckpointError on all workers: a
    snapshot could not be saved.

    Attributes:
        storage: state that storage has and lacks.
        begun: recent snapshots by iteration, kept in case the committing worker or a writer dies.
    """

    def __init__(
        self, parts: Components, settings: Settings, health: StorageHealth, start: ResumePoint, describe: Describer
    ):
        self._parts, self._settings, self._start = parts, settings, start
        self._position, self._record = start.position, start.record  # of the last completed iteration
        self._describe = lambda: describe(self._position, self._record)
        self._failure = Failure()
        self._reservation = Reservation(parts, settings, recovered=start.in_memory)
        self.storage = StorageTier(parts.policy, health, start, has_memory_tier=parts.tiers.memory is not None)
        memory = MemoryTier(
            parts, reservation=self._reservation, storage=self.storage, failure=self._failure, start=start
        )
        self._memory, self.begun = memory, memory.begun
        self._stages = _stages(parts, settings, self.storage, self._reservation, memory, self._failure, self._describe)
        self._failure.sources += [health.problem, self._stages.failure]

    def reserve(self, first: bool) -> None:
        """Allocates memory, and raises errors, as :meth:`Reservation.make` does."""
        self._reservation.make(self._position.iteration, len(json.dumps(self._describe())), first)

    def begin_again(self) -> None:
        """Begins the snapshot of the resumed position if it is lost, or was due and had not begun."""
        plan, start = self._start.again, self._start
        if plan is not None and self.storage.owes(plan):
            return
        if plan is not None:  # the policy counts it as begun
            storage = self.storage.part_of(plan, self._stages.window_may_begin)
            self.storage.begins(plan, storage)
            if storage is not None:
                self._parts.policy.storage.on_write_begun(storage)
            self._stages.copying.begin(plan, storage)
            if self._settings.blocking:
                self._wait_until_durable()
        elif start.record is not None and start.position.iteration > (start.newest or 0):
            self.begin_if_planned(start.position, start.record)

    def begin_if_planned(self, position: Position, record: StepRecord | None) -> None:
        """Begins a snapshot of the completed iteration if the policy plans one; weights must be gathered."""
        self._position, self._record = position, record
        parts, stages, health = self._parts, self._stages, self.storage.health
        self.storage.request_base(position.iteration)
        load = parts.tokens and parts.tokens.load
        plan, storage = self.storage.plan(position.iteration, load, stages.window_may_begin)
        if plan is not None and self._reservation.limits(plan, load):
            plan, storage = self.storage.plan(position.iteration, load, stages.window_may_begin)
        if plan is not None:
            _check(parts.policy, plan)
            with parts.meter.stalling():
                self.begin(plan, storage)
                stages.copying.wait_for_gradients()
                if self._settings.blocking:
                    self._wait_until_durable()
        else:
            self.storage.passes(position.iteration, load)
        health.passes(position.iteration, next((snapshot.iteration for snapshot in stages.to_storage), None))
        health.lags(self.storage.lag(position.iteration))
        # a hanging write does not disturb training, and must not prevent measurement of the interval
        busy = stages.not_in_memory or (stages.to_storage and not health.late)
        parts.meter.ended(started=plan is not None, busy=bool(busy))

    def begin(self, plan: SnapshotPlan, storage: SnapshotPlan | None) -> None:
        """Begins a snapshot after waiting for a buffer and, without a memory tier, for storage."""
        _record_start(plan, storage, self.storage, self._parts, self._settings)
        while not self._stages.have_room(self._reservation):
            self._all_reduce(for_storage=not self._stages.has_memory_tier)
        self._reservation.look_ahead(plan.iteration)
        self._reservation.trim()
        self._stages.copying.begin(plan, storage)

    def contribution(self) -> dict[str, Any]:
        """Returns this worker's entries of the commit all-reduce; see :class:`CommitParticipant`."""
        parts = self._parts
        progress = self._stages.progress()  # before the failures, so that no failed future counts as done
        failed = {"snapshot_failed": float(self._failure.find() is not None)}
        folded = {} if parts.folds is None else parts.folds.contribution()
        logged = {} if parts.upstream is None else parts.upstream.contribution()
        others = self.storage.health.contribution() | parts.meter.contribution() | parts.digests.contribution()
        return others | logged | progress | failed | folded

    def receive(self, totals: dict[str, float]) -> None:
        """Receives the totals of an iteration's commit all-reduce."""
        meter = self._parts.meter
        meter.reduced()
        # a commit in memory counts as a stall; otherwise nothing may count, since --snapshot-interval auto
        # measures undisturbed iterations
        is_copied = self._stages.copying.is_done(totals_at(totals, 0))
        with meter.stalling() if is_copied else contextlib.nullcontext():
            self._advance(totals)
        seconds = meter.trained(totals)
        if seconds is not None:
            self._parts.report.trained(seconds, totals["snapshot_bubble_s"] / self._parts.world.size)

    def wait_for_copies(self) -> None:
        """Waits for copies of the state that the update changes, and for snapshots that lag too far behind."""
        stages, limit = self._stages, (self._position.iteration, self._settings.max_snapshot_lag)
        if stages.is_lagging(*limit):
            begun, awaits_storage = time.monotonic(), not stages.has_memory_tier
            with self._parts.meter.stalling():
                while stages.is_lagging(*limit):
                    self._all_reduce(for_storage=awaits_storage)
                    if awaits_storage:
                        self.storage.health.is_waited_for(time.monotonic() - begun)
        if stages.copying.queue:
            with self._parts.meter.stalling():
                stages.copying.wait_for_copies()

    def finish(self) -> None:
        """Waits until every snapshot is committed in each of its tiers."""
        begun, health = time.monotonic(), self.storage.health
        while not self._stages.is_empty or health.closed:
            health.wait()
            self._all_reduce(for_storage=True)
            health.is_waited_for(time.monotonic() - begun)
        self._all_reduce()

    def flush(self) -> None:
        """Ends the run in good order: saves its state to storage, with retries, and releases the node's memory."""
        parts = self._parts
        last = FinalSave(
            self,
            parts=parts,
            settings=self._settings,
            start=self._start,
            reservation=self._reservation,
            memory=self._memory,
            stages=self._stages,
        )
        last.run(self._position.iteration)
        if parts.folds is not None:
            parts.folds.close()
        if parts.peers is not None:
            parts.peers.quiesce()
        if parts.tiers.memory is not None and self.storage.memory_is_free and parts.tiers.leads_node:
            parts.tiers.memory.remove_all()
        if parts.upstream is not None:
            parts.upstream.delete()
        parts.report.end(parts.tokens)

    @property
    def gauges(self) -> dict[str, float]:
        """Gauges of storage, and of copies in bubbles."""
        parts = self._parts
        found = self.storage.health.gauges | parts.report.gauges
        if "storage_age" in found and parts.tokens is not None and not recovers_exactly(parts.policy):
            found["mlt_storage"] = parts.tokens.storage_lacks(self.storage.persisted.iteration)
        return found

    def close(self) -> None:
        """Stops carrying experts."""
        self._memory.carrying.close()

    def _wait_until_durable(self) -> None:
        while self._stages.not_durable:
            self._all_reduce(for_storage=not self._stages.has_memory_tier)
        self._all_reduce()

    def _all_reduce(self, for_storage: bool = False) -> None:
        """Waits for progress of this worker, and exchanges it with the others in an extra all-reduce."""
        self._stages.wait(for_storage)
        self._advance(sum_over_workers(self.contribution(), self._parts.world))

    def _advance(self, totals: dict[str, float]) -> None:
        """Receives the totals of an all-reduce, of an iteration or extra."""
        parts = self._parts
        self._reservation.rotation = self._reservation.rotation.committed()
        parts.report.stalled(self.storage.begun, parts.meter.receive(totals))
        if totals["snapshot_failed"]:
            raise CheckpointError(first_reported(self._failure.find()))
        if parts.upstream is not None:
            parts.upstream.on_totals(totals)
        self.storage.health.receive(totals)
        parts.digests.on_totals(totals)
        if parts.folds is not None and (folded := parts.folds.on_totals(totals)):
            parts.report.folded(self._position.iteration, folded)
        self._memory.release_superseded()
        self._stages.advance(totals)


class FinalSave:
    """Saves the state of a run to storage at its end.

    Args:
        pipeline: begins snapshots, and waits for them.
        parts: components of the generation.
        settings: settings of the session.
        start: point where the run resumed.
        reservation: buffers, and the memory that they take.
        memory: snapshots in memory.
        stages: stages of the pipeline.
    """

    def __init__(
        self,
        pipeline: SavingPipeline,
        *,
        parts: Components,
        settings: Settings,
        start: ResumePoint,
        reservation: Reservation,
        memory: MemoryTier,
        stages: Stages,
    ):
        self._pipeline, self._storage, self._parts, self._settings = pipeline, pipeline.storage, parts, settings
        self._start, self._reservation, self._memory, self._stages = start, reservation, memory, stages

    def run(self, iteration: int) -> None:
        """Saves the state after an iteration, with retries.

        Raises:
            CheckpointError: on all workers: it could not be saved.
        """
        self._attempt(iteration)
        for pause in LAST_TRIES_S:
            if self._storage.has(iteration):
                break
            time.sleep(pause)
            self._attempt(iteration)
        if not self._storage.has(iteration):
            raise CheckpointError(self._problem(iteration), code="storage-unwritable")

    def _attempt(self, iteration: int) -> None:
        storage = self._storage
        self._pipeline.finish()
        if iteration != 0 and (iteration != storage.begun or not storage.complete):
            self._begin_everything(iteration)
            self._pipeline.finish()
        newest, rotation = self._memory.newest, self._reservation.rotation
        if newest is not None and newest.iteration != storage.newest and rotation.holds(newest.iteration):
            self._stages.writing.begin_from_memory(newest)
            self._pipeline.finish()
        elif newest is None and storage.begun != storage.newest and self._stages.has_memory_tier:
            # nothing was computed since the recovery
            path = [recovered for recovered in self._start.in_memory if recovered <= (storage.begun or 0)]
            with self._trying():
                copy_to_storage(path, self._parts.tiers, self._parts.policy)
                storage.newest = storage.begun

    def _begin_everything(self, iteration: int) -> None:
        """Begins a full snapshot at the end of a run; no other is pending or follows."""
        parts = self._parts
        everything = full_plan(parts.policy, iteration)
        with self._trying():
            run_on_rank0(lambda: parts.tiers.storage.remove(iteration), "cannot replace a partial snapshot")
        if not self._reservation.rotation.holds(iteration):
            self._pipeline.begin(everything, everything)
            return
        # memory needs the partial snapshot of this iteration, so the full one goes only to storage
        _record_start(everything, everything, self._storage, parts, self._settings)
        self._stages.copying.begin(everything, everything, in_memory=False)

    def _problem(self, iteration: int) -> str:
        storage, kept = self._storage, self._memory.newest
        newest = "none is there" if storage.newest is None else f"the newest one there is of iteration {storage.newest}"
        in_memory = "" if kept is None else f", and of iteration {kept.iteration} in memory"
        return f"the last state, of iteration {iteration}, is not saved ({newest}{in_memory}): {storage.problem}"

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """Context for a storage operation that fails on all workers or on none, and may be retried."""
        try:
            yield
        except CheckpointError as error:
            if self._settings.save_failure == "stop" or isinstance(error, TakenError):
                raise
            self._storage.problem = with_code(error)


def storage_health(
    settings: Settings, parts: Components, start: ResumePoint, log: Listener, in_background: bool
) -> StorageHealth:
    """Builds the tracker of failures; with ``in_background``, storage is taken and cleaned up in the background."""

    def make_ready() -> None:
        parts.tiers.storage.take()
        tidy_storage(parts.tiers, start)

    prepares = in_background and parts.world.rank == 0
    return StorageHealth(
        name=parts.tiers.storage.storage.name,
        every=parts.tiers.persist_interval if parts.tiers.memory is not None else None,
        late_after=settings.persist_interval or LATE_AFTER,
        newest=None if start.newest in start.in_memory else start.newest,
        log=log,
        publishes_in=lambda: parts.policy.schedule.window_length - 1 + ALL_REDUCES,
        prepare=(lambda: parts.committer.in_background(make_ready)) if prepares else None,
        is_closed=in_background,
    )


def _stages(
    parts: Components,
    settings: Settings,
    storage: StorageTier,
    reservation: Reservation,
    memory: MemoryTier,
    failure: Failure,
    describe: Callable[[], dict],
) -> Stages:
    # otherwise the next snapshot replaces one whose write has failed
    stops = settings.save_failure == "stop"
    pauses_s = RETRIES_S if Capability.WINDOWS in parts.policy.requires and not stops else ()
    removing = Removing(world=parts.world, committer=parts.committer, storage=storage, stops=stops)
    committing = Committing(
        world=parts.world,
        committer=parts.committer,
        storage=storage,
        tokens=parts.tokens,
        upstream=parts.upstream if parts.tiers.memory is None else None,
        removing=removing,
        pauses_s=pauses_s,
    )
    writing = Writing(
        workers=parts.world.size,
        policy=parts.policy,
        saver=parts.saver,
        reservation=reservation,
        tokens=parts.tokens,
        meter=parts.meter,
        report=parts.report,
        committing=committing,
        removing=removing,
        pauses_s=pauses_s,
    )
    replicating = Replicating(parts, memory=memory)
    copying = Copying(
        parts,
        reservation=reservation,
        memory=memory,
        failure=failure,
        describe=describe,
        replicating=replicating,
        writing=writing,
    )
    return Stages(
        copying=copying,
        replicating=replicating,
        writing=writing,
        committing=committing,
        removing=removing,
        has_memory_tier=parts.tiers.memory is not None,
    )


def _record_start(
    plan: SnapshotPlan, storage: SnapshotPlan | None, stored: StorageTier, parts: Components, settings: Settings
) -> None:
    """Records the start of a snapshot before it, so that it is begun again if a worker is lost meanwhile."""
    stored.begins(plan, storage)
    parts.policy.on_snapshot(plan, parts.tokens and parts.tokens.load)
    if storage is not None:
        parts.policy.storage.on_write_begun(storage)
    if parts.tokens is not None:
        parts.tokens.begun(plan, storage)
        parts.report.at_risk(plan.iteration, parts.policy, parts.tokens, settings.train_iters)


def _check(policy: Policy, plan: SnapshotPlan) -> None:
    try:
        check_plan(policy, plan)
    except ValueError as error:
        raise CheckpointError(str(error), code=code_of(error)) from None
