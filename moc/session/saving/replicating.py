"""Commits copied snapshots in memory, and replicates them to peers; a snapshot is then durable in memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import override

from moc.fault_points import reach
from moc.policy import Capability
from moc.runtime.collectives import first_reported, gather
from moc.session.carriers import Carrying
from moc.session.components import Components
from moc.session.peers import Copied
from moc.session.resume.point import ResumePoint
from moc.session.resume.survivors import StartedSnapshot
from moc.session.saving.reservation import Reservation
from moc.session.saving.stage import Failure, SnapshotInProgress, Stage, started
from moc.session.saving.storage import StorageTier


class MemoryTier:
    """Snapshots in memory: their buffers, their commits on this node, and their release.

    Without a memory tier, only the buffers.  Every worker calls every method.

    Args:
        parts: components of the generation.
        reservation: buffers, and the memory that they take.
        storage: state that storage has and lacks.
        failure: receives the errors of this worker.
        start: point where the run resumes.

    Attributes:
        carrying: carries experts from older snapshots.
        newest: the newest snapshot that is durable in memory; None if there is none yet.
        begun: recent snapshots by iteration, kept in case the committing worker or a writer dies.
        dependent: iterations of snapshots that need an abandoned one.
    """

    def __init__(
        self,
        parts: Components,
        *,
        reservation: Reservation,
        storage: StorageTier,
        failure: Failure,
        start: ResumePoint,
    ):
        self._parts, self._reservation, self._storage, self._failure = parts, reservation, storage, failure
        self.carrying = Carrying(parts.tiers, parts.policy, parts.carriers, parts.folds)
        self.newest: SnapshotInProgress | None = None
        self.begun = dict(start.begun)
        self.dependent: set[int] = set()
        self._superseded: int | None = None  # memory supersedes snapshots before this iteration

    def remember(self, snapshot: SnapshotInProgress) -> None:
        """Adds a snapshot to :attr:`begun`, and drops the oldest."""
        self.begun[snapshot.iteration] = StartedSnapshot(dict(snapshot.plan.operators), snapshot.state_in_memory)
        # two windows, and those still being copied
        most = 2 * self._parts.policy.schedule.window_length + self._reservation.rotation.spare
        for older in sorted(self.begun)[:-most]:
            del self.begun[older]

    def commit(self, snapshot: SnapshotInProgress) -> None:
        """Commits the parts of this node's workers in its memory, on the worker that leads it.

        Until the next all-reduce, no worker may overwrite the previous snapshot.
        """
        tiers = self._parts.tiers
        if tiers.memory is not None and tiers.leads_node:
            with self._failure.remembering():
                part = snapshot.snapshot.sealed.result()
                self._parts.committer.commit_in_memory(snapshot.plan, snapshot.state_in_memory, part)
            self.carrying.committed(snapshot.iteration)
        reach("snapshot_committed")

    def is_durable(self, snapshot: SnapshotInProgress) -> None:
        """Records that the snapshot is durable on all workers, so that older ones are no longer needed."""
        parts, iteration = self._parts, snapshot.iteration
        self._reservation.rotation = self._reservation.rotation.complete(iteration)
        if parts.tokens is not None:
            parts.tokens.snapshotted(iteration)
        if parts.tiers.memory is not None:
            if snapshot.plan.supersedes is not None:
                self._superseded = snapshot.plan.supersedes
            self.newest = snapshot
            parts.tap.on_stored(snapshot.plan)

    def release_superseded(self) -> None:
        """Releases superseded snapshots; an all-reduce has passed since the newest commit, so all nodes have it."""
        parts = self._parts
        if self._superseded is not None and parts.tiers.leads_node:
            with self._failure.remembering():
                self.carrying.release_before(self._superseded)
                if parts.peers is not None:
                    parts.peers.release_before(self._superseded)
            with contextlib.suppress(OSError):  # another process has the memory: a later call tries again
                self._reservation.fill_spare()
        self._superseded = None

    def abandon(self, snapshot: SnapshotInProgress, later: Iterable[SnapshotInProgress] = ()) -> None:
        """Abandons a snapshot because a worker lacks memory; earlier durable snapshots stay.

        If a state is spread over several snapshots, the others of its window are abandoned, too.  So are those of
        ``later``, begun since then, which may need it.
        """
        parts, iteration, before = self._parts, snapshot.iteration, self._reservation.rotation
        if error := first_reported(str(snapshot.out_of_memory or "") or None):
            parts.report.abandoned(iteration, error)
        self._storage.abandoned(snapshot.plan)
        if iteration in self.dependent:
            self.dependent.remove(iteration)
        else:
            parts.policy.schedule.restart_window()
            if Capability.WINDOWS in parts.policy.requires:
                ended = before.newest_end(iteration)
                self.dependent = {other.iteration for other in later if other.iteration > ended}
        self.begun.pop(iteration, None)
        if not snapshot.snapshot.in_memory:
            return
        self._reservation.rotation = before.abandon(iteration)
        memory = parts.tiers.memory
        if memory is not None and parts.tiers.leads_node:
            with self._failure.remembering():
                for released in before.held() - self._reservation.rotation.held():
                    memory.remove(released)
                    if parts.peers is not None:
                        parts.peers.remove(released)
                self.carrying.abandoned(iteration)


class Replicating(Stage):
    """Second stage: commits a copied snapshot in memory, and copies it to the memory of peers, if there are any.

    Args:
        parts: components of the generation.
        memory: snapshots in memory.
    """

    entry = "snapshot_replicated"

    def __init__(self, parts: Components, *, memory: MemoryTier):
        super().__init__(parts.world.size)
        self._peers, self._nodes = parts.peers, len(set(parts.tiers.nodes))
        self._meter, self._report, self._memory = parts.meter, parts.report, memory

    def begin(self, snapshot: SnapshotInProgress) -> None:
        """Commits a snapshot that all workers have copied, and starts to replicate it; does not wait for that."""
        self._memory.commit(snapshot)
        if self._peers is None:
            self._memory.is_durable(snapshot)
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
        copies = Copied() if work is None or work.exception() else work.result()
        return {
            "snapshot_replicated": float(snapshot is not None),
            "snapshot_replicated_bytes": float(copies.bytes),
            "snapshot_alike_bytes": float(copies.alike),
            "snapshot_not_alike": float(bool(copies.trouble)),
            "snapshot_copies_missing": float(len(copies.missing)),
            "snapshot_replicate_s": copies.seconds,
        }

    @override
    def complete(self, snapshot: SnapshotInProgress, totals: Mapping[str, float]) -> None:
        iteration = snapshot.iteration
        amount, seconds = int(totals["snapshot_replicated_bytes"]), totals["snapshot_replicate_s"] / self._nodes
        alike = int(totals["snapshot_alike_bytes"])
        self._report.replicated(iteration, amount, alike, seconds)
        # budgets count all copied bytes, sent or not
        self._meter.replicated(amount + alike, seconds, self._nodes)
        if totals["snapshot_copies_missing"]:
            mine = list(self.work(snapshot).result().missing)
            self._report.copies_missing(iteration, [reason for reasons in gather(mine) for reason in reasons])
        if totals["snapshot_not_alike"]:
            mine = self.work(snapshot).result().trouble
            self._report.not_alike(iteration, [reason for reasons in gather(mine) for reason in reasons])
        if iteration in self._memory.dependent:
            self._memory.abandon(snapshot)
        else:
            self._memory.is_durable(snapshot)
