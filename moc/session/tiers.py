"""The tiers that snapshots go to, the nodes of a job, and the claim under which the job commits."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moc.errors import with_code
from moc.runtime import environment
from moc.runtime.collectives import first_reported, gather, run_on_all, run_on_rank0
from moc.runtime.job import World
from moc.session.engine import Listener
from moc.session.settings import Settings, SettingsError, node_names
from moc.store.errors import CheckpointError
from moc.store.host_memory import Leftover, leftover, memory_paths_of_other_runs, memory_storage
from moc.store.ownership import Claim
from moc.store.storage import DEFAULT_LEASE_S, LocalStorage, Storage, record_lease
from moc.store.store import Run, Store, begin_run, record_run, storage_at

LOOKING_S = 5.0
"""Seconds that storage may take to list its checkpoints, if a run can resume without them."""

LIVE_LOOKING_S = 0.5
"""The same, if workers still have the state of the newest iteration."""

_FILES = 1 << 15
"""Bytes for the files of a claim, a run and a lease."""


@dataclass(frozen=True)
class Tiers:
    """Tiers that snapshots go to.

    Attributes:
        storage: the checkpoints in ``--ckpt-dir``.
        memory: the checkpoints in this node's memory; None with ``--ckpt-tier disk``.
        nodes: by rank, the name of its node.
        leads_node: this worker commits in this node's memory.
        node: ranks of this node's workers.
        persist_interval: with a memory tier, iterations between snapshots that also go to storage.
        keep: checkpoints to keep in storage.
    """

    storage: Store
    memory: Store | None
    nodes: tuple[str, ...]
    leads_node: bool
    node: tuple[int, ...]
    persist_interval: int | None
    keep: int

    @property
    def before(self) -> Store | None:
        """Experts of superseded memory on this node, kept until a snapshot that replaces them is durable."""
        if self.memory is None:
            return None
        return Store(LocalStorage(Path(self.memory.storage.name) / "before", in_memory=True), allows_slack=True)


def tiers_of(settings: Settings, world: World, nodes: Sequence[str], claim: Claim) -> Tiers:
    """Builds the tiers of a job; ``nodes`` has the node names by rank."""
    node = tuple(rank for rank, name in enumerate(nodes) if name == nodes[world.rank])
    memory = Store(memory_of(settings, world, nodes, claim), allows_slack=True) if settings.tier != "disk" else None
    return Tiers(
        storage=Store(storage_at(settings.directory, claim)),
        memory=memory,
        nodes=tuple(nodes),
        leads_node=world.rank == node[0],
        node=node,
        persist_interval=settings.persist_interval,
        keep=settings.keep,
    )


def memory_of(settings: Settings, world: World, nodes: Sequence[str], claim: Claim) -> LocalStorage:
    """Returns the location of the memory tier on this node."""
    several = len(set(nodes)) > 1 or world.job.max_nodes > 1  # they may share a machine
    launched = os.environ.get(environment.NODE) if several else None
    emulated = nodes[world.rank] if settings.node_of_rank else launched
    return memory_storage(settings.memory_dir, settings.directory, claim.run, emulated, claim)


def nodes_of(node_of_rank: str | None, world: World) -> list[str]:
    """Returns the node names by rank: as given, the rank block in the job under our launcher, or the host name.

    A collective call.  The replacement of a lost node has the same ranks, and receives the copies that other nodes keep
    for them.

    Raises:
        SettingsError: the given names do not fit the job.
    """
    if node_of_rank is None:
        return gather(os.environ["GROUP_RANK"] if environment.AGENT in os.environ else socket.gethostname())
    if (fewest := environment.min_nodes()) is not None:
        raise SettingsError(
            f"--node-of-rank names the nodes of all workers, and --nnodes {fewest}:... continues with fewer. Fix: drop "
            "it, or start the job with a fixed number of nodes",
            code="node-names-invalid",
        )
    nodes = node_names(node_of_rank)
    if len(nodes) != world.size:
        raise SettingsError(
            f"--node-of-rank names the node of {len(nodes)} of {world.size} workers. Fix: name one for each",
            code="node-names-invalid",
        )
    return nodes


def check_nodes(slices: Sequence[int], tiers: Tiers, tier: str) -> None:
    """Refuses tensor-parallel ranks on several nodes: norms and routers would be in the memory of only one of them.

    Compute weights and router biases follow the optimizer: a rank that does not load them receives them from its
    data-parallel peers.  ``slices`` are the ranks that hold the tensor-parallel slices of this stage.

    Raises:
        CheckpointError: there are such ranks.
    """
    if not set(tiers.node).issuperset(slices):
        raise CheckpointError(
            f"--ckpt-tier {tier} cannot save norms and routers, which tensor-parallel ranks on several nodes "
            "share. Fix: keep tensor parallelism inside of a node, or take --ckpt-tier disk",
            code="tensor-parallel-across-nodes",
        )


def make_claim(settings: Settings, world: World, known_run: str | None, log: Listener) -> Claim:
    """Returns the claim under which this generation commits snapshots; a collective call.

    A job reads the run from storage when it starts.  Later the survivors know it, and storage is not accessed.  A
    survivor passes the run that it knows; others pass None.

    Raises:
        CheckpointError: on all workers: storage cannot be used.
    """
    run = next((run_id for run_id in gather(known_run) if run_id), None)
    if run is None:
        storage = storage_at(settings.directory)
        run = run_on_rank0(
            lambda: begin_run(storage, settings.directory).run, f"cannot use {storage.name} for snapshots"
        )
        log.message(f"run {run}: its snapshots are in {storage.name}")
    return Claim(world.job.id, world.job.term, run)


def make_room_for_files(storage: Storage) -> None:
    """Releases spare memory of an earlier generation for the ownership files, if the file system is full."""
    if isinstance(storage, LocalStorage) and storage.free_bytes() < _FILES:
        storage.reserve.release(_FILES)


def take_ownership(settings: Settings, tiers: Tiers, world: World, trained: bool, log: Listener) -> bool:
    """Takes ownership of the tiers for the term of this generation; a collective call.

    A job takes storage when it starts, so that it ends before training if it cannot.  Later, the first read or commit
    there takes it (:meth:`moc.store.store.Store.take`): a job that can resume from memory does not wait for storage.

    Returns:
        Whether storage must still be taken and cleaned up, in the background, before anything is written there.

    Raises:
        CheckpointError: on all workers: another job, or a newer generation of this one, owns a tier.
    """
    is_first_generation, problem = not any(gather(trained)), None

    def take_tiers() -> None:
        nonlocal problem
        if world.rank == 0 and is_first_generation:
            problem = _take_storage(tiers, settings.directory)
        if tiers.memory is not None and tiers.leads_node:
            make_room_for_files(tiers.memory.storage)
            tiers.memory.take()
            record_run(tiers.memory.storage, Run(tiers.memory.storage.run, settings.directory, 0.0))
            record_lease(tiers.memory.storage, float(os.environ.get(environment.SILENCE_TIMEOUT, DEFAULT_LEASE_S)))

    used = settings.directory if tiers.memory is None else tiers.memory.storage.name
    run_on_all(take_tiers, f"cannot use {used} for snapshots")
    if problem := first_reported(problem):
        log.message(f"WARNING: snapshots are only in memory until storage works: {problem}")
    if is_first_generation and tiers.memory is not None:
        _report_other_runs(settings, tiers, log)
    return tiers.memory is not None and (not is_first_generation or problem is not None)


def _take_storage(tiers: Tiers, address: str) -> str | None:
    """Takes storage; if it cannot be used, returns the reason, or raises it if there is no memory tier."""
    try:
        tiers.storage.take()
        record_run(tiers.storage.storage, Run(tiers.storage.storage.run, address, 0.0))
    except OSError as error:
        reason = error.strerror or error
        problem = CheckpointError(
            f"{tiers.storage.storage.name} cannot be used for snapshots ({reason}). Fix: correct its permissions, make "
            "room or repair it",
            code="storage-unwritable",
        )
        if tiers.memory is None:
            raise problem from None
        return with_code(problem)
    return None


def _report_other_runs(settings: Settings, tiers: Tiers, log: Listener) -> None:
    leftovers: list[Leftover] = []
    if tiers.memory is not None and tiers.leads_node:
        run = tiers.memory.storage.run
        paths: list[Path] = memory_paths_of_other_runs(settings.memory_dir, settings.directory, run)
        leftovers = [unused for unused in map(leftover, paths) if unused.bytes and not unused.used_by]
    unused_bytes = {
        path: nbytes
        for node in gather([(str(unused.path), unused.bytes) for unused in leftovers])
        for path, nbytes in node
    }
    for path, nbytes in unused_bytes.items():
        log.message(
            f"WARNING: {path} has {nbytes / 1e9:.3g} GB of another run whose snapshots were in {settings.directory}: "
            "they are not used; if that run is not to be started again, remove them with "
            f"tools/clean_memory.py --remove {path}"
        )
