"""Snapshots in memory: their commit and release, and the allocation of their memory before training needs it.

Allocated are buffers, copies, files of experts, manifests and logs.

A longer window needs more memory.  Before one begins, the workers agree on the longest that fits.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import shutil
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from moc.errors import code_of
from moc.fault_points import reach
from moc.policy import Capability, Load, SnapshotPlan, full_plan
from moc.runtime.collectives import first_reported, gather, run_on_all
from moc.session.components import Components
from moc.session.helpers import ExpertRetention, experts_of
from moc.session.memory import (
    RunProgress,
    SnapshotWindow,
    bytes_of_experts,
    next_window,
    retained_files,
    trial_of,
)
from moc.session.resume.point import ResumePoint
from moc.session.resume.survivors import StartedSnapshot
from moc.session.saving.committing import Failure, SnapshotInProgress
from moc.session.saving.storage import StorageTier
from moc.session.settings import Settings
from moc.snapshot.buffer_pool import Rotation
from moc.store.errors import CheckpointError, InsufficientMemoryError
from moc.store.host_memory import RankMemory, ReservedMemory, most_copies, reserved_sizes, spare_buffers
from moc.store.reserved_memory import SLOTS_DIRECTORY, reserve_files
from moc.store.storage import RESERVE_FILE as SPARE_NAME
from moc.store.storage import SpaceReserve

_SMALL, _STATE, _ROUNDED = 4, 2, 4 << 12
"""Spare memory for a snapshot's manifest and report: factors of the described file's header and of the training
state in the manifest, and bytes for pages that these small files do not fill."""


class _Needed(NamedTuple):
    """Memory for windows, by rank and by node."""

    window: SnapshotWindow
    ranks: Sequence[RankMemory]
    nodes: Mapping[str, ReservedMemory]


class Reservation:
    """Buffers for the snapshots of a generation, and other memory that they take.

    Every worker calls every method except :meth:`fill_spare`.

    Args:
        components: components of the generation.
        settings: settings of the session.
        recovered: iterations of the snapshots that memory has from before.

    Attributes:
        rotation: rotation of the buffers.
        window: the windows that memory is allocated for.
        most_buffers: maximum number of a rank's buffers for these windows.
    """

    def __init__(self, components: Components, settings: Settings, recovered: Iterable[int] = ()):
        self._world, self._policy, self._tiers = components.world, components.policy, components.tiers
        self._contents, self._saver, self._peers = components.contents, components.saver, components.peers
        self._tokens, self._upstream, self._report = components.tokens, components.upstream, components.report
        self._directory, self._tier = settings.memory_dir, "peers" if components.peers is not None else settings.tier
        self.rotation = Rotation.of(
            spare_buffers(self._tier),
            keep=components.tiers.memory is not None,
            recovered=recovered,
            stores=components.tiers.persist_interval is not None,
        )
        self.window = SnapshotWindow()
        self.most_buffers = self.rotation.max_buffers(self.window.length, self.window.kept)
        self._length = 0  # window length of the policy at the last look_ahead()
        self._small = self._state = 0
        self._experts: dict[str, list[int]] = {}
        self._needed: Mapping[str, ReservedMemory] = {}  # by node, allocated memory

    def make(self, iteration: int, state: int, is_first: bool) -> None:
        """Allocates the memory of this node's snapshots, and of its copies of other nodes' snapshots.

        Args:
            iteration: iterations completed.
            state: bytes of the training state in a manifest.
            is_first: this is the first generation of the job.  Later, insufficient memory does not end it.

        Raises:
            CheckpointError: on all workers, in the first generation: a node has too little memory.
        """
        self._saver.reuse_buffers(slot.iteration for slot in self.rotation.slots if slot.iteration is not None)
        self._state = state
        self.look_ahead(iteration)
        self._experts = self._files_of_experts(iteration)
        needed = self._needs(self.window)
        maximum = ReservedMemory.most(needed.nodes.values())
        try:
            self._allocate(needed, remove_unused=True)
        except CheckpointError as error:
            if is_first:
                raise CheckpointError(f"{error} ({maximum.describe()})", code=code_of(error)) from None
            self._report.not_reserved(iteration, str(error))
        if is_first:
            self._report.reserved(maximum)

    def look_ahead(self, iteration: int) -> None:
        """Computes the size of the policy's next window, if it has windows in memory and their length has changed."""
        length = self._policy.schedule.window_length
        if Capability.WINDOWS in self._policy.requires and self._tiers.memory is not None and length != self._length:
            self._length, self.window = length, self._of_busiest(next_window(self._policy, self._contents, iteration))
            self.most_buffers = self.rotation.max_buffers(self.window.length, self.window.kept)

    def trim(self) -> None:
        """Frees buffers that the policy's windows no longer need."""
        self.rotation = self.rotation.trimmed(self.most_buffers)
        self._saver.trim(max(len(self.rotation.slots), self.most_buffers))

    def limits(self, plan: SnapshotPlan, load: Load | None) -> bool:
        """Limits the windows of the policy to the longest that fits, and allocates memory for it.

        Args:
            plan: plan of the next snapshot.
            load: tokens of each expert, as for the plan.
        """
        if (
            Capability.WINDOWS not in self._policy.requires
            or self._tiers.memory is None
            or plan.since != plan.iteration
        ):
            return False
        trial = trial_of(self._policy)
        trial.on_snapshot(plan, load)
        requested, before = trial.schedule.window_length, self.window.length
        if requested <= before:
            return False

        def window_of(length: int) -> SnapshotWindow:
            shorter = trial_of(self._policy)
            shorter.interval.limit_window_length(length)
            return self._of_busiest(next_window(shorter, self._contents, plan.iteration - 1))

        def is_too_long(length: int) -> bool:
            return not self._fits(self._needs(window_of(length)))

        longest = before + bisect.bisect_left(range(before + 1, requested + 1), True, key=is_too_long)
        if longest > before:
            try:
                self._allocate(self._needs(window_of(longest)))
            except CheckpointError:  # another process has taken the memory meanwhile
                longest = before
                self._saver.trim(max(len(self.rotation.slots), self.most_buffers))
        self._policy.interval.limit_window_length(longest)
        if longest == requested:
            return False
        self._report.window_limited(plan.iteration, requested, longest)
        return True

    def fill_spare(self) -> None:
        """Allocates room for the manifests in this node's memory.

        Raises:
            OSError: memory is insufficient.
        """
        if self._tiers.memory is not None and self._tiers.leads_node:
            SpaceReserve(self._root / SPARE_NAME).allocate(self._small)

    @property
    def _root(self) -> Path:
        assert self._tiers.memory is not None  # callers have a memory tier
        return Path(self._tiers.memory.storage.name)

    def _of_busiest(self, window: SnapshotWindow) -> SnapshotWindow:
        """Returns the window with the size of the busiest rank: operators may be saved in another order later."""
        return window._replace(snapshot=max(filter(None, gather(window.snapshot)), default=None))

    def _files_of_experts(self, iteration: int) -> dict[str, list[int]]:
        """Returns, by slot, the sizes of the files that the node retains; empty unless this worker leads the node."""
        experts = [operator.name for operator in experts_of(self._policy)]
        if self._tiers.memory is None or not experts:
            return {}
        sizes = gather(bytes_of_experts(self._contents, experts, Capability.GRADIENTS in self._policy.requires))
        if not self._tiers.leads_node:
            return {}
        progress, spare = RunProgress(iteration, self._tokens and self._tokens.load), spare_buffers(self._tier)
        return retained_files(self._policy, [sizes[rank] for rank in self._tiers.node], spare - 1, progress)

    def _needs(self, window: SnapshotWindow) -> _Needed:
        """Gathers the needs of all ranks for windows."""
        rotation = self.rotation
        full = self._contents.share(full_plan(self._policy, 0).operators).layout
        buffers = reserved_sizes(rotation.max_buffers(window.length, window.kept), full.nbytes, window.snapshot)
        count = most_copies(window.kept, rotation.spare) if self._peers is not None else 0
        copies = reserved_sizes(count, full.nbytes, window.snapshot) if count else []
        per_snapshot = _SMALL * full.header_bytes + _STATE * self._state + _ROUNDED
        small = per_snapshot * len(buffers) * rotation.keep
        logs = 0 if self._upstream is None else self._upstream.bytes_for(_logged(window))
        ranks = [RankMemory._make(needs) for needs in gather(RankMemory(buffers, copies, small, logs, self._experts))]
        nodes = ReservedMemory.of(
            ranks, self._tiers.nodes, [] if self._peers is None else gather(self._peers.copied_nodes)
        )
        return _Needed(window, ranks, nodes)

    def _fits(self, needed: _Needed) -> bool:
        """Whether all nodes' file systems and machines have the memory that is needed beyond the allocated."""
        free_bytes = min(shutil.disk_usage(self._root).free, int(psutil.virtual_memory().available))
        local = socket.gethostname(), os.stat(self._root).st_dev, free_bytes
        free: dict[tuple[str, int], int] = {}
        missing: Counter[tuple[str, int]] = Counter()
        for rank, (host, device, free_bytes) in enumerate(gather(local)):
            file_system, node = (host, device), self._tiers.nodes[rank]
            free[file_system] = min(free_bytes, free[file_system]) if file_system in free else free_bytes
            if rank == self._tiers.nodes.index(node):  # nodes may share a file system
                allocated = self._needed[node].total if node in self._needed else 0
                missing[file_system] += needed.nodes[node].total - allocated
        return all(missing[file_system] <= free[file_system] for file_system in free)

    def _allocate(self, needed: _Needed, remove_unused: bool = False) -> None:
        """Allocates memory on all nodes; keeps sufficient files, and with ``remove_unused`` no other free ones.

        Raises:
            CheckpointError: on all workers: a node has too little memory.
        """
        run_on_all(lambda: self._allocate_local(needed, remove_unused), "cannot allocate memory for snapshots")
        self._needed = needed.nodes

    def _allocate_local(self, needed: _Needed, remove_unused: bool) -> None:
        ranks, rank, node = needed.ranks, self._world.rank, self._tiers.node
        self._small = sum(ranks[node_rank].small for node_rank in node)
        recovered = len(self.rotation.slots)
        for number, nbytes in enumerate(ranks[rank].own[recovered:], recovered):
            self._saver.reserve(number, nbytes)
        if self._upstream is not None:
            self._upstream.reserve(_logged(needed.window))
        try:
            if self._peers is not None:
                self._peers.reserve(ranks, self._small, node.index(rank), len(node), remove_unused)
            for name, sizes in self._experts.items():
                reserve_files(self._root / SLOTS_DIRECTORY, name, sizes, remove_unused)
            self.fill_spare()
        except OSError as error:
            raise InsufficientMemoryError(
                f"memory for snapshots cannot be allocated in {self._directory} ({error.strerror or error}). Fix: free "
                "memory, enlarge the file system (Docker: --shm-size), or name another one with --ckpt-memory-dir"
            ) from None


def _logged(window: SnapshotWindow) -> int:
    """Returns the number of iterations with upstream logs: a complete window, and the current one."""
    return 2 * window.length


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
            if components.upstream is not None:
                components.upstream.on_stored(snapshot.plan)

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
