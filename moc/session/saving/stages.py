"""The stages of the saving pipeline: copy a snapshot, replicate it, write it, commit it in storage, or remove it."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import ClassVar, override

from moc.background import CpuAffinity, share_interpreter
from moc.errors import with_code
from moc.fault_points import reach
from moc.policy import Policy, SnapshotPlan
from moc.runtime.collectives import first_reported, gather
from moc.runtime.job import World
from moc.session.components import Components
from moc.session.engine import PipelineTap
from moc.session.peers import CopyOutcome
from moc.session.saving.committing import Committer, Failure, SnapshotInProgress
from moc.session.saving.memory_tier import MemoryTier, Reservation
from moc.session.saving.metrics import Meter, SnapshotReport
from moc.session.saving.storage import StorageTier, tolerable_error
from moc.session.tokens import TokenTracker
from moc.snapshot.saver import Saver
from moc.state.operators import Detail
from moc.store.errors import CheckpointError

POSITIONS = 2
"""Snapshots of a stage that one all-reduce can report: one more than can begin per iteration.  Otherwise one late
snapshot delays all later ones."""


class Stage(ABC):
    """Stage of the pipeline: snapshots in the order of their beginning, which is identical on all workers.

    A snapshot leaves the stage when an all-reduce has shown that its work is done on all workers.

    Attributes:
        queue: snapshots whose work is not known to be done on all workers.
    """

    entry: ClassVar[str]
    """Entry of the commit all-reduce with the number of workers whose work is done."""

    def __init__(self, workers: int):
        self._workers = workers
        self.queue: deque[SnapshotInProgress] = deque()

    @abstractmethod
    def work(self, snapshot: SnapshotInProgress) -> Future:
        """Returns the work of this stage on this worker."""

    @abstractmethod
    def entries(self, snapshot: SnapshotInProgress | None) -> dict[str, float]:
        """Returns this worker's entries for a snapshot whose work is done; without one, the same entries as 0."""

    @abstractmethod
    def complete(self, snapshot: SnapshotInProgress, totals: Mapping[str, float]) -> None:
        """Passes a snapshot to the next stage; all workers do so after the same all-reduce."""

    def tolerates(self, snapshot: SnapshotInProgress) -> bool:
        """Whether training continues after an error of this worker's work."""
        return False

    def progress(self) -> list[dict[str, float]]:
        """Returns this worker's entries of the commit all-reduce for the first :data:`POSITIONS` snapshots."""
        finished = list(takewhile(lambda snapshot: self.work(snapshot).done(), self.queue))
        return [self.entries(finished[position] if position < len(finished) else None) for position in range(POSITIONS)]

    def advance(self, totals: Mapping[str, float]) -> None:
        """Receives the totals for one position: completes the first snapshot if its work is done on all workers."""
        if self.is_done(totals):
            self.complete(self.queue.popleft(), totals)

    def is_done(self, totals: Mapping[str, float]) -> bool:
        """Whether the work for the first snapshot is done on all workers."""
        return totals[self.entry] == self._workers

    def failure(self) -> str | None:
        """Returns the error on this worker that must end the run, if any."""
        futures = ((snapshot, self.work(snapshot)) for snapshot in self.queue)
        finished = [future for snapshot, future in futures if future.done() and not self.tolerates(snapshot)]
        return next((with_code(error) for future in finished if (error := future.exception())), None)


class StorageStage(Stage):
    """Stage whose work is done in storage: training continues after most of its errors."""

    @override
    def tolerates(self, snapshot: SnapshotInProgress) -> bool:
        return tolerable_error(self.work(snapshot)) is not None


class Copying(Stage):
    """First stage: copies this worker's part of a snapshot to host memory.

    Args:
        components: components of the generation.
        reservation: buffers, and the memory that they take.
        memory: snapshots in memory.
        failure: receives the errors of this worker.
        describe: returns the non-tensor state.
        replicating: next stage.
        writing: stage of snapshots that also go to storage.
    """

    entry = "snapshot_copied"

    def __init__(
        self,
        components: Components,
        *,
        reservation: Reservation,
        memory: MemoryTier,
        failure: Failure,
        describe: Callable[[], dict],
        replicating: Replicating,
        writing: Writing,
    ):
        super().__init__(components.world.size)
        self._components, self._reservation, self._memory, self._failure = components, reservation, memory, failure
        self._describe, self._replicating, self._writing = describe, replicating, writing
        self._cpu_affinity = CpuAffinity(len(components.tiers.node))
        share_interpreter()

    def begin(self, plan: SnapshotPlan, storage: SnapshotPlan | None, in_memory: bool = True) -> None:
        """Starts to copy into a free buffer, and to write the part that goes to storage once it is finalized.

        Args:
            plan: plan of the snapshot.
            storage: the part of it that goes to storage; None if nothing does.
            in_memory: it goes to the memory tier, if there is one; otherwise only to storage.
        """
        components, rotation = self._components, self._reservation.rotation
        free, all_free = rotation.free(), rotation.all_free()
        slot = -1 if free is None else free  # -1: a buffer outside the rotation, only for storage
        if in_memory:
            self._reservation.rotation = rotation.begin(plan.iteration, storage is not None, plan.supersedes)
        retention = self._memory.retention
        try:
            share = components.contents.with_gradients(plan.operators, plan.compared)
            entries = components.contents.entries(plan.operators, share)
            retained = retention.begin(plan) if in_memory else None
            self._cpu_affinity.move(retention.processes + components.hasher.processes)
            state = self._describe()  # before a thread copies: both need the GIL
            nbytes = None if plan.complete else self._reservation.window.snapshot
            digests = components.digests.of_snapshot(plan.iteration)
            local = components.saver.take(
                slot, plan.iteration, share, entries, all_free, in_memory, retained, nbytes, digests
            )
        except CheckpointError as error:
            self._failure.reason = with_code(error)  # the next all-reduce reports it to the others
            return
        snapshot = SnapshotInProgress(plan, storage, state, local)
        self.queue.append(snapshot)
        self._memory.add_started(snapshot)
        if storage is not None:  # needs no all-reduce
            self._writing.begin(snapshot)

    def wait_for_gradients(self) -> None:
        """Waits for the copies of gradients that the next iteration clears; none if all are in the second buffer."""
        for local in (snapshot.snapshot for snapshot in self.queue):
            if local.gradients is not None:
                start = time.perf_counter()
                local.gradients.wait()
                local.gradients_s += time.perf_counter() - start
                reach("gradient_staged")

    def wait_for_copies(self) -> None:
        """Waits for the copies of state that the update changes."""
        for snapshot in self.queue:
            snapshot.snapshot.state.wait()

    @override
    def work(self, snapshot: SnapshotInProgress) -> Future:
        return snapshot.snapshot.finalized

    @override
    def tolerates(self, snapshot: SnapshotInProgress) -> bool:
        return snapshot.out_of_memory is not None

    @override
    def entries(self, snapshot: SnapshotInProgress | None) -> dict[str, float]:
        local = None if snapshot is None else snapshot.snapshot
        capture = None if local is None or local.finalized.exception() else local.capture
        return {
            "snapshot_copied": float(local is not None),
            "snapshot_no_room": float(snapshot is not None and snapshot.out_of_memory is not None),
            "snapshot_bytes": float(local.layout.nbytes if local else 0),
            "snapshot_copy_s": 0.0 if capture is None else capture.seconds,
            "snapshot_bubble_bytes": float(0 if capture is None else capture.bubble_bytes),
            "snapshot_gradients_s": 0.0 if local is None or capture is None else local.gradients_s + local.delay(),
            "snapshot_seal_s": local.finalize_s if local else 0.0,
        }

    @override
    def complete(self, snapshot: SnapshotInProgress, totals: Mapping[str, float]) -> None:
        if totals["snapshot_no_room"] or snapshot.iteration in self._memory.dependent:
            self._memory.abandon(snapshot, later=[*self._replicating.queue, *self.queue])
            return
        self._components.meter.copied(totals)
        self._components.report.snapshot(snapshot.iteration, totals, self._components.world.size)
        if snapshot.snapshot.in_memory:  # otherwise it is durable once written
            self._replicating.begin(snapshot)


class Replicating(Stage):
    """Second stage: commits a copied snapshot in memory, and copies it to the memory of peers, if there are any."""

    entry = "snapshot_replicated"

    def __init__(self, components: Components, *, memory: MemoryTier):
        super().__init__(components.world.size)
        self._peers, self._nodes = components.peers, len(set(components.tiers.nodes))
        self._meter, self._report, self._memory = components.meter, components.report, memory

    def begin(self, snapshot: SnapshotInProgress) -> None:
        """Commits a snapshot that all workers have copied, and starts to replicate it; does not wait for that."""
        self._memory.commit(snapshot)
        if self._peers is None:
            self._memory.on_durable(snapshot)
        else:
            replicated = self._peers.replicate(snapshot.iteration, snapshot.plan.remote)
            self.queue.append(dataclasses.replace(snapshot, replicated=replicated))
            reach("replicating")

    @override
    def work(self, snapshot: SnapshotInProgress) -> Future:
        return started(snapshot.replicated)

    @override
    def entries(self, snapshot: SnapshotInProgress | None) -> dict[str, float]:
        work = None if snapshot is None else self.work(snapshot)
        copies = CopyOutcome() if work is None or work.exception() else work.result()
        return {
            "snapshot_replicated": float(snapshot is not None),
            "snapshot_replicated_bytes": float(copies.bytes),
            "snapshot_alike_bytes": float(copies.identical),
            "snapshot_not_alike": float(bool(copies.problems)),
            "snapshot_copies_missing": float(len(copies.missing)),
            "snapshot_replicate_s": copies.seconds,
        }

    @override
    def complete(self, snapshot: SnapshotInProgress, totals: Mapping[str, float]) -> None:
        iteration = snapshot.iteration
        amount, seconds = int(totals["snapshot_replicated_bytes"]), totals["snapshot_replicate_s"] / self._nodes
        identical = int(totals["snapshot_alike_bytes"])
        self._report.replicated(iteration, amount, identical, seconds)
        # budgets count all copied bytes, sent or not
        self._meter.replicated(amount + identical, seconds, self._nodes)
        if totals["snapshot_copies_missing"]:
            local_reasons = list(self.work(snapshot).result().missing)
            self._report.copies_missing(iteration, [reason for reasons in gather(local_reasons) for reason in reasons])
        if totals["snapshot_not_alike"]:
            local_reasons = self.work(snapshot).result().problems
            self._report.replicas_differ(iteration, [reason for reasons in gather(local_reasons) for reason in reasons])
        if iteration in self._memory.dependent:
            self._memory.abandon(snapshot)
        else:
            self._memory.on_durable(snapshot)


class Writing(StorageStage):
    """Third stage: writes this worker's part of a snapshot to storage.

    Storage needs no all-reduce to begin, so a snapshot enters this stage when it begins.

    Args:
        workers: number of workers.
        policy: plans snapshots.
        saver: writes this worker's parts.
        reservation: buffers, and the memory that they take.
        tokens: token ledger; None if no policy needs it.
        meter: measurement of an iteration.
        report: report of the cost.
        committing: next stage.
        removing: stage of snapshots that cannot be written.
        pauses_s: pauses before the repetitions of a failed write.
    """

    entry = "snapshot_written"

    def __init__(
        self,
        *,
        workers: int,
        policy: Policy,
        saver: Saver,
        reservation: Reservation,
        tokens: TokenTracker | None,
        meter: Meter,
        report: SnapshotReport,
        committing: Committing,
        removing: Removing,
        pauses_s: Sequence[float],
    ):
        super().__init__(workers)
        self._policy, self._saver, self._reservation, self._tokens = policy, saver, reservation, tokens
        self._meter, self._report, self._pauses_s = meter, report, pauses_s
        self._committing, self._removing = committing, removing

    def begin(self, snapshot: SnapshotInProgress) -> None:
        """Starts to write a snapshot once it is finalized, without waiting."""
        plan, storage = snapshot.plan, snapshot.storage_plan
        is_everything = storage.operators == plan.operators and not plan.compared
        self._saver.persist(snapshot.snapshot, None if is_everything else storage.operators, self._pauses_s)
        self.queue.append(snapshot)

    def begin_from_memory(self, snapshot: SnapshotInProgress) -> None:
        """Starts to write a snapshot of this iteration that is only in memory.

        Gradients are not written, because they need other snapshots.
        """
        plan = snapshot.plan.without(Detail.GRAD)
        self._reservation.rotation = self._reservation.rotation.persist(plan.iteration)
        self._policy.storage.on_write_begun(plan)
        if self._tokens is not None:
            self._tokens.on_write_start(plan)
        self.begin(dataclasses.replace(snapshot, storage=plan))

    @override
    def work(self, snapshot: SnapshotInProgress) -> Future:
        return started(snapshot.snapshot.persisted)

    @override
    def entries(self, snapshot: SnapshotInProgress | None) -> dict[str, float]:
        local = None if snapshot is None else snapshot.snapshot
        return {
            "snapshot_written": float(local is not None),
            "snapshot_written_bytes": float(local.persisted_bytes if local else 0),
            "snapshot_write_s": local.persist_s if local else 0.0,
            "snapshot_retries": float(local.retries if local else 0),
            "snapshot_unwritten": float(snapshot is not None and self.tolerates(snapshot)),
        }

    @override
    def complete(self, snapshot: SnapshotInProgress, totals: Mapping[str, float]) -> None:
        """Passes the snapshot to the commit in storage, or abandons it if some rank could not write its part."""
        self._reservation.rotation = self._reservation.rotation.persisted(snapshot.iteration)
        if totals["snapshot_unwritten"]:
            self._removing.begin(snapshot, self.work(snapshot))
            return
        self._meter.written(totals)
        if totals["snapshot_retries"]:
            self._report.retried(snapshot.iteration, int(totals["snapshot_retries"]))
        amount, write_s = int(totals["snapshot_written_bytes"]), totals["snapshot_write_s"] / self._workers
        self._committing.begin(snapshot, amount, write_s)


class Committing(StorageStage):
    """Last stage of a snapshot that all workers have written to storage: commits it there.

    Args:
        world: ranks of the job.
        committer: commits it, on rank 0.
        storage: state that storage has and lacks.
        tokens: token ledger; None if no policy needs it.
        upstream: logs of the pipeline; None without them, and if they depend on the memory tier.
        removing: stage of snapshots that cannot be committed.
        pauses_s: pauses before the repetitions of a failed commit.
    """

    entry = "snapshot_published"

    def __init__(
        self,
        *,
        world: World,
        committer: Committer,
        storage: StorageTier,
        tokens: TokenTracker | None,
        upstream: PipelineTap | None,
        removing: Removing,
        pauses_s: Sequence[float],
    ):
        super().__init__(world.size)
        self._world, self._committer, self._storage, self._pauses_s = world, committer, storage, pauses_s
        self._tokens, self._upstream, self._removing = tokens, upstream, removing

    def begin(self, snapshot: SnapshotInProgress, amount: int, write_s: float) -> None:
        """Starts to commit a snapshot of ``amount`` bytes, written in ``write_s`` seconds."""
        plan, pauses_s = snapshot.storage_plan, self._pauses_s
        committed = _on_rank0(
            self._world,
            lambda: self._committer.commit_in_storage(plan, snapshot.state, amount, write_s, pauses_s),
        )
        self.queue.append(dataclasses.replace(snapshot, committed=committed))

    @override
    def work(self, snapshot: SnapshotInProgress) -> Future:
        return started(snapshot.committed)

    @override
    def entries(self, snapshot: SnapshotInProgress | None) -> dict[str, float]:
        return {
            "snapshot_published": float(snapshot is not None),
            "snapshot_unpublished": float(snapshot is not None and self.tolerates(snapshot)),
        }

    @override
    def complete(self, snapshot: SnapshotInProgress, totals: Mapping[str, float]) -> None:
        """Records that storage has the snapshot, or abandons it."""
        if totals["snapshot_unpublished"]:
            self._removing.begin(snapshot, self.work(snapshot))
            return
        self._storage.on_committed(snapshot.storage_plan)
        if self._upstream is not None and not self._storage.is_window_incomplete(snapshot.plan):
            self._upstream.on_stored(snapshot.plan)
        if self._tokens is not None:
            self._tokens.on_storage_complete(snapshot.iteration)


class Removing(StorageStage):
    """Last stage of a snapshot that could not be saved to storage: removes its files there.

    Args:
        world: ranks of the job.
        committer: removes the files, on rank 0.
        storage: state that storage has and lacks.
        stop_on_save_failure: such a failure ends the run.
    """

    entry = "snapshot_removed"

    def __init__(self, *, world: World, committer: Committer, storage: StorageTier, stop_on_save_failure: bool):
        super().__init__(world.size)
        self._world, self._committer, self._storage = world, committer, storage
        self._stop_on_save_failure = stop_on_save_failure

    def begin(self, snapshot: SnapshotInProgress, failed: Future) -> None:
        """Abandons a snapshot after ``failed`` on some workers; all do so after the same all-reduce.

        Raises:
            CheckpointError: on all workers, if such a failure ends the run.
        """
        error = tolerable_error(failed)
        self._storage.problem = first_reported(None if error is None else with_code(error)) or ""
        if self._stop_on_save_failure:
            raise CheckpointError(self._storage.problem)
        self._storage.on_failure(snapshot.plan, snapshot.storage_plan, snapshot.snapshot.in_memory)
        removed = _on_rank0(self._world, lambda: self._committer.remove_abandoned(snapshot.iteration))
        self.queue.append(dataclasses.replace(snapshot, committed=removed))

    @override
    def work(self, snapshot: SnapshotInProgress) -> Future:
        return started(snapshot.committed)

    @override
    def entries(self, snapshot: SnapshotInProgress | None) -> dict[str, float]:
        return {"snapshot_removed": float(snapshot is not None)}

    @override
    def complete(self, snapshot: SnapshotInProgress, totals: Mapping[str, float]) -> None:
        """Forgets the snapshot."""


def _on_rank0(world: World, start: Callable[[], Future]) -> Future:
    """Starts an operation on rank 0; other ranks return a finished future."""
    if world.rank == 0:
        return start()
    finished: Future = Future()
    finished.set_result(None)
    return finished


def started[T](future: Future[T] | None) -> Future[T]:
    """Returns a future that exists, because its work started before the snapshot entered the stage."""
    assert future is not None
    return future
