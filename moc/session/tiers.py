"""Builds the tiers that snapshots go to, and names the nodes of a job."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moc.runtime import environment
from moc.runtime.collectives import gather
from moc.runtime.job import World
from moc.session.settings import Settings, SettingsError, node_names
from moc.store.errors import CheckpointError
from moc.store.host_memory import memory_storage, renew_lease
from moc.store.object_storage import storage_at
from moc.store.ownership import Claim
from moc.store.storage import LocalStorage
from moc.store.store import Store

LOOKING_S = 5.0
"""Seconds that storage may take to list its checkpoints, if a run can resume without them."""

LIVE_LOOKING_S = 0.5
"""The same, if workers still have the state of the newest iteration."""


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

    def renew_lease(self) -> None:
        """Shows that the job in this node's memory is alive (:mod:`moc.store.host_memory`)."""
        if self.memory is not None and self.leads_node:
            renew_lease(Path(self.memory.storage.name))

    @property
    def before(self) -> Store | None:
        """Experts of superseded memory on this node, kept until a snapshot that replaces them is durable."""
        if self.memory is None:
            return None
        return Store(LocalStorage(Path(self.memory.storage.name) / "before", in_memory=True), allows_slack=True)


def tiers_of(settings: Settings, world: World, nodes: Sequence[str], claim: Claim) -> Tiers:
    """Builds the tiers of a job; ``nodes`` has the node names by rank."""
    node = tuple(rank for rank, other in enumerate(nodes) if other == nodes[world.rank])
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
    several = len(set(nodes)) > 1 or environment.node_limits()[1] > 1  # they may share a machine
    launched = os.environ.get(environment.NODE) if several else None
    emulated = nodes[world.rank] if settings.node_of_rank else launched
    return memory_storage(settings.memory_dir, settings.directory, claim.run, emulated, claim)


def nodes_of(told: str | None, world: World) -> list[str]:
    """Returns the node names by rank: as given, the rank block in the job under our launcher, or the host name.

    A collective call.  The replacement of a lost node has the same ranks, and receives the copies that other nodes keep
    for them.

    Raises:
        SettingsError: the given names do not fit the job.
    """
    if told is None:
        return gather(os.environ["GROUP_RANK"] if environment.AGENT in os.environ else socket.gethostname())
    if (fewest := environment.min_nodes()) is not None:
        raise SettingsError(
            f"--node-of-rank names the nodes of all workers, and --nnodes {fewest}:... continues with fewer. Fix: drop "
            "it, or start the job with a fixed number of nodes",
            code="node-names-invalid",
        )
    nodes = node_names(told)
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
