"""Copies snapshots to host memory in the background, and from there to the memory of peers and to storage.

Background threads stay off the training core and hold the GIL only briefly.  A woken thread that copies or hashes often
runs on the training core, where it ran before. Training then waits for milliseconds although another core is idle. On
another core, the thread still competes for the GIL. It takes the GIL for each call and passes it to the first waiting
thread, which may not run yet. Training then sleeps until its switch interval ends. Applied separately, the two measures
save little, since one wait turns into the other; together they save most (``docs/results/selective-overhead.md``).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import override

from moc.errors import with_code
from moc.fault_points import reach
from moc.policy import Capability, Policy, SnapshotPlan
from moc.runtime.collectives import first_reported, gather
from moc.session.components import Components
from moc.session.helpers import ExpertRetention
from moc.session.peers import CopyOutcome
from moc.session.resume.point import ResumePoint
from moc.session.resume.survivors import StartedSnapshot
from moc.session.saving.committing import Committing, Removing
from moc.session.saving.metrics import Meter, SnapshotReport
from moc.session.saving.reservation import Reservation
from moc.session.saving.stage import Failure, SnapshotInProgress, Stage, started
from moc.session.saving.storage import StorageStage, StorageTier
from moc.session.tokens import TokenTracker
from moc.snapshot.saver import Saver
from moc.state.operators import Detail
from moc.store.errors import CheckpointError

SWITCH_S = 1e-4
"""Python's switch interval during snapshots; its default of 5 ms is as long as a complete copy."""

_BACKGROUND, _AWAITED = "snapshot-", "event-log"
"""Name prefixes of background threads, and of threads that training waits for."""

_LIBC = ctypes.CDLL(None)


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


class MemoryTier:
    """Snapshots in memory: their buffers, their commits on this node, and their release.

    Without a memory tier, only the buffers.  Every worker calls every method.

    Args:
        components: components of the generation.
        reservation: buffers, and the memory that they take.
        storage: state that storage has and lacks.
        failure: receives the errors of this worker.
        start: point where the run resumes.

    Attributes:
        retention: retains the states of experts from older snapshots.
        newest: the newest snapshot that is durable in memory; None if there is none yet.
        started_snapshots: recent snapshots by iteration, kept in case the committing worker or a writer dies.
        dependent: iterations of snapshots that need an abandoned one.
    """

    def __init__(
        self,
        components: Components,
        *,
        reservation: Reservation,
        storage: StorageTier,
        failure: Failure,
        start: ResumePoint,
    ):
        self._components, self._reservation, self._storage, self._failure = components, reservation, storage, failure
        self.retention = ExpertRetention(
            components.tiers, components.policy, components.retention_client, components.background_optimizer
        )
        self.newest: SnapshotInProgress | None = None
        self.started_snapshots = dict(start.started_snapshots)
        self.dependent: set[int] = set()
        self._superseded: int | None = None  # memory supersedes snapshots before this iteration

    def add_started(self, snapshot: SnapshotInProgress) -> None:
        """Adds a snapshot to :attr:`started_snapshots`, and drops the oldest."""
        self.started_snapshots[snapshot.iteration] = StartedSnapshot(
            dict(snapshot.plan.operators), snapshot.state_in_memory
        )
        # two windows, and those still being copied
        limit = 2 * self._components.policy.schedule.window_length + self._reservation.rotation.spare
        for iteration in sorted(self.started_snapshots)[:-limit]:
            del self.started_snapshots[iteration]

    def commit(self, snapshot: SnapshotInProgress) -> None:
        """Commits the parts of this node's workers in its memory, on the worker that leads it.

        Until the next all-reduce, no worker may overwrite the previous snapshot.
        """
        tiers = self._components.tiers
        if tiers.memory is not None and tiers.leads_node:
            with self._failure.recording_errors():
                report = snapshot.snapshot.finalized.result()
                self._components.committer.commit_in_memory(snapshot.plan, snapshot.state_in_memory, report)
            self.retention.committed(snapshot.iteration)
        reach("snapshot_committed")

    def on_durable(self, snapshot: SnapshotInProgress) -> None:
        """Records that the snapshot is durable on all workers, so that older ones are no longer needed."""
        components, iteration = self._components, snapshot.iteration
        self._reservation.rotation = self._reservation.rotation.complete(iteration)
        if components.tokens is not None:
            components.tokens.on_memory_complete(iteration)
        if components.tiers.memory is not None:
            if snapshot.plan.supersedes is not None:
                self._superseded = snapshot.plan.supersedes
            self.newest = snapshot
            components.tap.on_stored(snapshot.plan)

    def release_superseded(self) -> None:
        """Releases superseded snapshots; an all-reduce has passed since the newest commit, so all nodes have it."""
        components = self._components
        if self._superseded is not None and components.tiers.leads_node:
            with self._failure.recording_errors():
                self.retention.release_before(self._superseded)
                if components.peers is not None:
                    components.peers.release_before(self._superseded)
            with contextlib.suppress(OSError):  # another process has the memory: a later call tries again
                self._reservation.fill_spare()
        self._superseded = None

    def abandon(self, snapshot: SnapshotInProgress, later: Iterable[SnapshotInProgress] = ()) -> None:
        """Abandons a snapshot because a worker lacks memory; earlier durable snapshots stay.

        If a state is spread over several snapshots, the others of its window are abandoned, too.  So are those of
        ``later``, started since then, which may need it.
        """
        components, iteration, before = self._components, snapshot.iteration, self._reservation.rotation
        if error := first_reported(str(snapshot.out_of_memory or "") or None):
            components.report.abandoned(iteration, error)
        self._storage.on_abandoned(snapshot.plan)
        if iteration in self.dependent:
            self.dependent.remove(iteration)
        else:
            components.policy.schedule.restart_window()
            if Capability.WINDOWS in components.policy.requires:
                window_end = before.newest_end(iteration)
                self.dependent = {newer.iteration for newer in later if newer.iteration > window_end}
        self.started_snapshots.pop(iteration, None)
        if not snapshot.snapshot.in_memory:
            return
        self._reservation.rotation = before.abandon(iteration)
        memory = components.tiers.memory
        if memory is not None and components.tiers.leads_node:
            with self._failure.recording_errors():
                for released in before.in_use() - self._reservation.rotation.in_use():
                    memory.remove(released)
                    if components.peers is not None:
                        components.peers.remove(released)
                self.retention.abandoned(iteration)


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


def share_interpreter() -> None:
    """Lets waiting threads of this process request the GIL sooner."""
    sys.setswitchinterval(SWITCH_S)


class CpuAffinity:
    """Keeps background threads and processes off the training core if there is another core.

    Args:
        workers: number of workers on this node, each with its own training core.
    """

    def __init__(self, workers: int):
        self._workers, self._moved = workers, None

    def move(self, processes: Iterable[int] = ()) -> None:
        """Moves this process's background threads, and other processes, off the current core.

        The training thread calls it. Background threads and processes may use the other cores that it may use. The
        current core is left to training and the threads that it waits for. Processes run only when no thread needs
        their core; otherwise training could wait for them through such a thread.
        """
        allowed = os.sched_getaffinity(0)
        if len(allowed) <= self._workers:
            return
        core, threads = _processor(), threading.enumerate()
        background, awaited = (
            {thread.native_id for thread in threads if thread.native_id is not None and thread.name.startswith(name)}
            for name in (_BACKGROUND, _AWAITED)
        )
        placement = core, allowed, background | {*processes}, awaited
        if placement == self._moved:
            return
        self._moved = placement
        for thread_ids, cores in ((placement[2], allowed - {core}), (awaited, {core})):
            for thread_id in thread_ids:
                with contextlib.suppress(OSError):  # it has ended, or the machine forbids it
                    os.sched_setaffinity(thread_id, cores)
        for process in processes:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))


def _processor() -> int:
    """Returns the core that the calling thread runs on."""
    return _LIBC.sched_getcpu()
