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
from moc.runtime.collectives import first_reported, run_on_all, run_on_rank0, sum_over_workers
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
        entries = [stage.progress() for stage in self]
        return {
            f"{name}[{position}]": value
            for position in range(POSITIONS)
            for stage_entries in entries
            for name, value in stage_entries[position].items()
        }

    def advance(self, totals: Mapping[str, float]) -> None:
        """Receives the totals: each snapshot whose work is done on all workers leaves its stage."""
        for position in range(POSITIONS):
            position_totals = totals_at(totals, position)
            for stage in self:
                stage.advance(position_totals)

    def failure(self) -> str | None:
        """Returns the error on this worker that must end the run, if any."""
        return next(filter(None, (stage.failure() for stage in self)), None)

    def wait(self, for_storage: bool) -> None:
        """Waits for progress of this worker; waits for other nodes and for storage are short.

        Storage may hang, and is waited for only if the caller cannot continue without it (``for_storage``).
        """
        futures = {stage: stage.work(stage.queue[0]) for stage in self if stage.queue}
        if self.copying in futures:
            wait([futures[self.copying]])
        elif self.replicating in futures:  # only the all-reduce reports a lost node
            wait([futures[self.replicating]], timeout=_WAIT_S)
        elif for_storage:
            pending = [work for work in futures.values() if not work.done()]
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

    def is_lagging(self, iteration: int, limit: int | None) -> bool:
        """Whether a snapshot that is not durable lags at least ``limit`` iterations behind; None for no limit."""
        return limit is not None and any(iteration - snapshot.iteration >= limit for snapshot in self.not_durable)

    @property
    def outstanding(self) -> int:
        """Number of snapshots for storage that have begun, and are neither committed nor removed.

        Storage may have files of them.  They count from their beginning, before their copies are done.
        """
        return len(self.removing.queue) + len(self.to_storage)

    def has_room(self, reservation: Reservation) -> bool:
        """Whether a snapshot may begin now; with a memory tier, storage does not matter."""
        rotation = reservation.rotation
        is_lagging = not self.has_memory_tier and not may_begin(self.outstanding, rotation.spare)
        return rotation.free() is not None and not is_lagging

    @property
    def window_may_begin(self) -> bool:
        """Whether storage may receive another snapshot or window, if there is a memory tier.

        Storage receives one at a time, which keeps its buffers until it is written.
        """
        writing = len(self.writing.queue)
        return window_may_begin(writing > 0, self.outstanding - writing)


def totals_at(totals: Mapping[str, float], position: int) -> dict[str, float]:
    """Returns the totals for the snapshots at a position of their queues when the all-reduce started."""
    return {
        name.removesuffix(f"[{position}]"): value for name, value in totals.items() if name.endswith(f"[{position}]")
    }


class SavingPipeline:
    """Copies, replicates, writes and commits the snapshots of one worker, in stages that run in the background.

    A snapshot enters the next stage when a commit all-reduce has shown that all workers have finished this one.
    Every worker calls every method except :meth:`close`.  Every method may raise CheckpointError on all workers: a
    snapshot could not be saved.

    Attributes:
        storage: state that storage has and lacks.
        started_snapshots: recent snapshots by iteration, kept in case the committing worker or a writer dies.
    """

    def __init__(
        self, components: Components, settings: Settings, health: StorageHealth, start: ResumePoint, describe: Describer
    ):
        self._components, self._settings, self._start = components, settings, start
        self._position, self._record = start.position, start.record  # of the last completed iteration
        self._describe = lambda: describe(self._position, self._record)
        self._failure = Failure()
        self._reservation = Reservation(components, settings, recovered=start.in_memory)
        self.storage = StorageTier(
            components.policy, health, start, has_memory_tier=components.tiers.memory is not None
        )
        memory = MemoryTier(
            components, reservation=self._reservation, storage=self.storage, failure=self._failure, start=start
        )
        self._memory, self.started_snapshots = memory, memory.started_snapshots
        self._stages = _stages(
            components, settings, self.storage, self._reservation, memory, self._failure, self._describe
        )
        self._failure.sources += [health.problem, self._stages.failure]

    def reserve(self, is_first: bool) -> None:
        """Allocates memory, and raises errors, as :meth:`Reservation.make` does."""
        self._reservation.make(self._position.iteration, len(json.dumps(self._describe())), is_first)

    def restart_snapshot(self) -> None:
        """Starts the snapshot of the resumed position if it is lost, or was due and not started."""
        plan, start = self._start.repeated_plan, self._start
        if plan is not None and self.storage.defer(plan):
            return
        if plan is not None:  # the policy counts it as started
            storage = self.storage.part_of(plan, self._stages.window_may_begin)
            self.storage.on_start(plan, storage)
            if storage is not None:
                self._components.policy.storage.on_write_begun(storage)
            self._stages.copying.begin(plan, storage)
            if self._settings.blocking:
                self._wait_until_durable()
        elif start.record is not None and start.position.iteration > (start.newest or 0):
            self.begin_if_planned(start.position, start.record)

    def begin_if_planned(self, position: Position, record: StepRecord | None) -> None:
        """Begins a snapshot of the completed iteration if the policy plans one; weights must be gathered."""
        self._position, self._record = position, record
        components, stages, health = self._components, self._stages, self.storage.health
        self.storage.request_base(position.iteration)
        load = components.tokens and components.tokens.load
        plan, storage = self.storage.plan(position.iteration, load, stages.window_may_begin)
        if plan is not None and self._reservation.limits(plan, load):
            plan, storage = self.storage.plan(position.iteration, load, stages.window_may_begin)
        if plan is not None:
            _validate(components.policy, plan)
            with components.meter.stalling():
                self.begin(plan, storage)
                stages.copying.wait_for_gradients()
                if self._settings.blocking:
                    self._wait_until_durable()
        else:
            self.storage.on_skipped_iteration(position.iteration, load)
        health.on_iteration(position.iteration, next((snapshot.iteration for snapshot in stages.to_storage), None))
        health.on_lag(self.storage.lag(position.iteration))
        # a hanging write does not disturb training, and must not prevent measurement of the interval
        busy = stages.not_in_memory or (stages.to_storage and not health.late)
        components.meter.on_iteration_end(started=plan is not None, busy=bool(busy))

    def begin(self, plan: SnapshotPlan, storage: SnapshotPlan | None) -> None:
        """Begins a snapshot after waiting for a buffer and, without a memory tier, for storage."""
        _record_start(plan, storage, self.storage, self._components, self._settings)
        while not self._stages.has_room(self._reservation):
            self._all_reduce(for_storage=not self._stages.has_memory_tier)
        self._reservation.look_ahead(plan.iteration)
        self._reservation.trim()
        self._stages.copying.begin(plan, storage)

    def contribution(self) -> dict[str, Any]:
        """Returns this worker's entries of the commit all-reduce; see :class:`CommitParticipant`."""
        components = self._components
        progress = self._stages.progress()  # before the failures, so that no failed future counts as done
        failed = {"snapshot_failed": float(self._failure.find() is not None)}
        folded = {} if components.background_optimizer is None else components.background_optimizer.contribution()
        logged = {} if components.upstream is None else components.upstream.contribution()
        entries = self.storage.health.contribution() | components.meter.contribution()
        return entries | components.digests.contribution() | logged | progress | failed | folded

    def receive(self, totals: dict[str, float]) -> None:
        """Receives the totals of an iteration's commit all-reduce."""
        meter = self._components.meter
        meter.reduced()
        # a commit in memory counts as a stall; otherwise nothing may count, since --snapshot-interval auto
        # measures undisturbed iterations
        is_copied = self._stages.copying.is_done(totals_at(totals, 0))
        with meter.stalling() if is_copied else contextlib.nullcontext():
            self._advance(totals)
        seconds = meter.trained(totals)
        if seconds is not None:
            self._components.report.trained(seconds, totals["snapshot_bubble_s"] / self._components.world.size)

    def wait_for_copies(self) -> None:
        """Waits for copies of the state that the update changes, and for snapshots that lag too far behind."""
        stages, limit = self._stages, (self._position.iteration, self._settings.max_snapshot_lag)
        if stages.is_lagging(*limit):
            start, awaits_storage = time.monotonic(), not stages.has_memory_tier
            with self._components.meter.stalling():
                while stages.is_lagging(*limit):
                    self._all_reduce(for_storage=awaits_storage)
                    if awaits_storage:
                        self.storage.health.on_wait(time.monotonic() - start)
        if stages.copying.queue:
            with self._components.meter.stalling():
                stages.copying.wait_for_copies()

    def finish(self) -> None:
        """Waits until every snapshot is committed in each of its tiers."""
        start, health = time.monotonic(), self.storage.health
        while not self._stages.is_empty or health.closed:
            health.wait()
            self._all_reduce(for_storage=True)
            health.on_wait(time.monotonic() - start)
        self._all_reduce()

    def flush(self) -> None:
        """Ends the run in good order: saves its state to storage, with retries, and releases the node's memory."""
        components = self._components
        final_save = FinalSave(
            self,
            components=components,
            settings=self._settings,
            start=self._start,
            reservation=self._reservation,
            memory=self._memory,
            stages=self._stages,
        )
        final_save.run(self._position.iteration)
        if components.background_optimizer is not None:
            components.background_optimizer.close()
        if components.peers is not None:
            components.peers.quiesce()
        if components.tiers.memory is not None and self.storage.memory_is_free and components.tiers.leads_node:
            components.tiers.memory.remove_all()
        if components.upstream is not None:
            components.upstream.delete()
        components.report.end(components.tokens)

    @property
    def gauges(self) -> dict[str, float]:
        """Gauges of storage, and of copies in bubbles."""
        components = self._components
        values = self.storage.health.gauges | components.report.gauges
        if "storage_age" in values and components.tokens is not None and not recovers_exactly(components.policy):
            values["mlt_storage"] = components.tokens.storage_lacks(self.storage.persisted.iteration)
        return values

    def close(self) -> None:
        """Stops retaining the states of experts from older snapshots."""
        self._memory.retention.close()

    def _wait_until_durable(self) -> None:
        while self._stages.not_durable:
            self._all_reduce(for_storage=not self._stages.has_memory_tier)
        self._all_reduce()

    def _all_reduce(self, for_storage: bool = False) -> None:
        """Waits for progress of this worker, and exchanges it with the others in an extra all-reduce."""
        self._stages.wait(for_storage)
        self._advance(sum_over_workers(self.contribution(), self._components.world))

    def _advance(self, totals: dict[str, float]) -> None:
        """Receives the totals of an all-reduce, of an iteration or extra."""
        components = self._components
        self._reservation.rotation = self._reservation.rotation.committed()
        components.report.stalled(self.storage.newest_started, components.meter.receive(totals))
        if totals["snapshot_failed"]:
            raise CheckpointError(first_reported(self._failure.find()))
        if components.upstream is not None:
            components.upstream.on_totals(totals)
        self.storage.health.receive(totals)
        components.digests.on_totals(totals)
        if components.background_optimizer is not None and (
            updates := components.background_optimizer.on_totals(totals)
        ):
            components.report.background_updates(self._position.iteration, updates)
        self._memory.release_superseded()
        self._stages.advance(totals)


class FinalSave:
    """Saves the state of a run to storage at its end.

    Args:
        pipeline: begins snapshots, and waits for them.
        components: components of the generation.
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
        components: Components,
        settings: Settings,
        start: ResumePoint,
        reservation: Reservation,
        memory: MemoryTier,
        stages: Stages,
    ):
        self._pipeline, self._storage = pipeline, pipeline.storage
        self._components, self._settings = components, settings
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
            raise CheckpointError(self._describe_problem(iteration), code="storage-unwritable")

    def _attempt(self, iteration: int) -> None:
        storage = self._storage
        self._pipeline.finish()
        if iteration != 0 and (iteration != storage.newest_started or not storage.complete):
            self._begin_full(iteration)
            self._pipeline.finish()
        newest, rotation = self._memory.newest, self._reservation.rotation
        if newest is not None and newest.iteration != storage.newest and rotation.holds(newest.iteration):
            self._stages.writing.begin_from_memory(newest)
            self._pipeline.finish()
        elif newest is None and storage.newest_started != storage.newest and self._stages.has_memory_tier:
            # nothing was computed since the recovery
            path = [recovered for recovered in self._start.in_memory if recovered <= (storage.newest_started or 0)]
            with self._recording_errors():
                copy_to_storage(path, self._components.tiers, self._components.policy)
                storage.newest = storage.newest_started

    def _begin_full(self, iteration: int) -> None:
        """Begins a full snapshot at the end of a run; no other is pending or follows."""
        components = self._components
        full = full_plan(components.policy, iteration)
        nbytes, problem = components.contents.share(full.operators).layout.nbytes, "cannot replace a partial snapshot"
        with self._recording_errors():
            if self._storage.holds(iteration):
                run_on_all(lambda: components.saver.check_room(nbytes), problem)
            run_on_rank0(lambda: components.tiers.storage.remove(iteration), problem)
            self._storage.on_removed(iteration)
        if self._storage.holds(iteration):
            return
        if not self._reservation.rotation.holds(iteration):
            self._pipeline.begin(full, full)
            return
        # memory needs the partial snapshot of this iteration, so the full one goes only to storage
        _record_start(full, full, self._storage, components, self._settings)
        self._stages.copying.begin(full, full, in_memory=False)

    def _describe_problem(self, iteration: int) -> str:
        storage, newest_in_memory = self._storage, self._memory.newest
        newest = "none is there" if storage.newest is None else f"the newest one there is of iteration {storage.newest}"
        in_memory = "" if newest_in_memory is None else f", and of iteration {newest_in_memory.iteration} in memory"
        return f"the last state, of iteration {iteration}, is not saved ({newest}{in_memory}): {storage.problem}"

    @contextlib.contextmanager
    def _recording_errors(self) -> Iterator[None]:
        """Context for a storage operation that fails on all workers or on none, and may be retried."""
        try:
            yield
        except CheckpointError as error:
            if self._settings.save_failure == "stop" or isinstance(error, TakenError):
                raise
            self._storage.problem = with_code(error)


def storage_health(
    settings: Settings, components: Components, start: ResumePoint, log: Listener, in_background: bool
) -> StorageHealth:
    """Builds the tracker of failures; with ``in_background``, storage is taken and cleaned up in the background."""

    def make_ready() -> None:
        components.tiers.storage.take()
        tidy_storage(components.tiers, start)

    prepares = in_background and components.world.rank == 0
    return StorageHealth(
        name=components.tiers.storage.storage.name,
        every=components.tiers.persist_interval if components.tiers.memory is not None else None,
        late_after=settings.persist_interval or LATE_AFTER,
        newest=None if start.newest in start.in_memory else start.newest,
        log=log,
        commit_delay=lambda: components.policy.schedule.window_length - 1 + ALL_REDUCES,
        prepare=(lambda: components.committer.in_background(make_ready)) if prepares else None,
        is_closed=in_background,
    )


def _stages(
    components: Components,
    settings: Settings,
    storage: StorageTier,
    reservation: Reservation,
    memory: MemoryTier,
    failure: Failure,
    describe: Callable[[], dict],
) -> Stages:
    # otherwise the next snapshot replaces one whose write has failed
    stop_on_save_failure = settings.save_failure == "stop"
    pauses_s = RETRIES_S if Capability.WINDOWS in components.policy.requires and not stop_on_save_failure else ()
    removing = Removing(
        world=components.world,
        committer=components.committer,
        storage=storage,
        stop_on_save_failure=stop_on_save_failure,
    )
    committing = Committing(
        world=components.world,
        committer=components.committer,
        storage=storage,
        tokens=components.tokens,
        upstream=components.upstream if components.tiers.memory is None else None,
        removing=removing,
        pauses_s=pauses_s,
    )
    writing = Writing(
        workers=components.world.size,
        policy=components.policy,
        saver=components.saver,
        reservation=reservation,
        tokens=components.tokens,
        meter=components.meter,
        report=components.report,
        committing=committing,
        removing=removing,
        pauses_s=pauses_s,
    )
    replicating = Replicating(components, memory=memory)
    copying = Copying(
        components,
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
        has_memory_tier=components.tiers.memory is not None,
    )


def _record_start(
    plan: SnapshotPlan, storage: SnapshotPlan | None, tier: StorageTier, components: Components, settings: Settings
) -> None:
    """Records the start of a snapshot before it, so that it is repeated if a worker is lost meanwhile."""
    tier.on_start(plan, storage)
    components.policy.on_snapshot(plan, components.tokens and components.tokens.load)
    if storage is not None:
        components.policy.storage.on_write_begun(storage)
    if components.tokens is not None:
        components.tokens.on_start(plan, storage)
        components.report.at_risk(plan.iteration, components.policy, components.tokens, settings.train_iters)


def _validate(policy: Policy, plan: SnapshotPlan) -> None:
    try:
        check_plan(policy, plan)
    except ValueError as error:
        raise CheckpointError(str(error), code=code_of(error)) from None
