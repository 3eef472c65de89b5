"""Builds one generation's components for snapshots and recovery."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass

from moc.policy import Capability, Policy, full_plan
from moc.recovery.copy_placement import Redundancy, redundancy
from moc.runtime.collectives import gather, run_on_all
from moc.runtime.device import check_generation
from moc.runtime.job import World
from moc.session.digests import Digests, KnownDigests
from moc.session.engine import Engine, Listener, PipelineTap
from moc.session.helpers import BackgroundOptimizer, Hasher, RetentionClient
from moc.session.peers import Peers, join_peers
from moc.session.resume.replay import check_freezing
from moc.session.saving.committing import Committer
from moc.session.saving.metrics import Meter, SnapshotReport
from moc.session.settings import Settings
from moc.session.tiers import Tiers, check_nodes, memory_of
from moc.session.tokens import TokenTracker
from moc.sharding import parse_scheme
from moc.sharding.save_plan import (
    StageReplicas,
    describe_replicas,
    pack_descriptors,
    replicated_operators,
    unpack_descriptors,
)
from moc.snapshot.buffer_pool import KeptBuffers
from moc.snapshot.contents import Contents
from moc.snapshot.device_copy import BubbleGate, bubbles_on
from moc.snapshot.saver import Saver
from moc.state.operators import Detail
from moc.store.errors import CheckpointError


@dataclass(frozen=True)
class Components:
    """Components of one generation on one worker.

    Attributes:
        peers: copies snapshots to other nodes; None without ``--ckpt-tier peers``.
        tokens: token ledger; None if no policy needs it.
        retention_client: retains experts from older snapshots in memory, if any may be older than the rest.
        background_optimizer: applies the gradients of chains in the background; None if the policy does not.
        hasher: hashes snapshots in memory.
        digests: digests of the state.
        upstream: logs of the traffic between pipeline stages; None without ``--upstream-logging``.
    """

    world: World
    tiers: Tiers
    policy: Policy
    peers: Peers | None
    contents: Contents
    saver: Saver
    committer: Committer
    tokens: TokenTracker | None
    upstream: PipelineTap | None
    meter: Meter
    report: SnapshotReport
    retention_client: RetentionClient
    background_optimizer: BackgroundOptimizer | None
    hasher: Hasher
    digests: Digests


class SizesByPlan:
    """Implementation of :class:`moc.policy.interface.SnapshotSizer`."""

    def __init__(self, components: Components):
        self._contents, self._rank = components.contents, components.world.rank
        names = list(dict.fromkeys(components.tiers.nodes))
        self.nodes = tuple(map(names.index, components.tiers.nodes))
        self.replicas = components.peers.replicas if components.peers is not None else 0

    def __call__(self, operators: Mapping[str, Detail]) -> int:
        """Returns the bytes of operators, each at its detail, on the rank that saves the most; a collective call."""
        return max(gather(max(self._contents.loads(operators).values(), default=0)))

    def by_rank(self, plans: Mapping[str, Mapping[str, Detail]]) -> dict[str, dict[int, int]]:
        """Returns the bytes of each rank by plan, if not 0; a collective call."""
        loads = {name: self._contents.loads(plan).get(self._rank, 0) for name, plan in plans.items()}
        local = {name: amount for name, amount in loads.items() if amount}
        bytes_by_plan: dict[str, dict[int, int]] = {name: {} for name in plans}
        for rank, bytes_of_rank in enumerate(gather(local)):
            for name, amount in bytes_of_rank.items():
                bytes_by_plan[name][rank] = amount
        return bytes_by_plan


def build(
    engine: Engine,
    settings: Settings,
    policy: Policy,
    tiers: Tiers,
    log: Listener,
    *,
    track_tokens: bool,
    is_restart: bool,
    buffers: KeptBuffers,
    known_digests: KnownDigests,
) -> Components:
    """Builds the components of a generation; a collective call.

    Without ``track_tokens``, there is no token ledger.  ``is_restart`` means that this worker was in an earlier
    generation, whose buffers are in ``buffers``.  ``known_digests`` has the digests that this worker knows.

    Raises:
        CheckpointError: on all workers: such snapshots cannot restore this state, or memory is insufficient.
        SettingsError: the settings do not fit the job.
    """
    world = engine.world
    with ExitStack() as undo:  # if a worker is lost meanwhile, all workers build again
        stage_replicas = stage_replicas_of(engine, policy)
        identical = _redundancy(engine, stage_replicas, tiers, policy)
        retention_client = undo.enter_context(closing(RetentionClient()))
        peers = (
            join_peers(settings, tiers, policy, identical, retention_client, log, is_restart)
            if settings.tier == "peers"
            else None
        )
        if peers is not None:
            undo.callback(peers.close)
        check_saving(engine, tiers, settings.tier)
        committer = undo.enter_context(closing(Committer(world, policy, tiers, engine.layout, log, identical.copies)))
        tokens = (
            undo.enter_context(closing(TokenTracker(engine, settings.train_iters, policy))) if track_tokens else None
        )
        upstream = _open_upstream_log(engine, settings, tiers, undo) if settings.upstream_logging else None
        nodes = tiers.nodes if tiers.memory is not None else ()
        contents = Contents(engine.state, stage_replicas, world.rank, parse_scheme(settings.sharding), nodes)
        bubbles = engine.tap.bubbles = bubbles_on(world.device) if Capability.BUBBLES in policy.requires else None
        hasher = undo.enter_context(closing(Hasher()))
        saver = _make_saver(world, tiers, bubbles, buffers, hasher)
        undo.callback(saver.close)
        background_optimizer = BackgroundOptimizer() if Capability.BACKGROUND_UPDATES in policy.requires else None
        if peers is not None and peers.replicas == 1:  # several copies of a node's snapshots would have different bases
            peers.background_optimizer = background_optimizer
        undo.pop_all()
    return Components(
        world=world,
        tiers=tiers,
        policy=policy,
        peers=peers,
        contents=contents,
        saver=saver,
        committer=committer,
        tokens=tokens,
        upstream=upstream,
        meter=Meter(world.size, float if bubbles is None else bubbles.take),
        report=SnapshotReport(log, settings.tier),
        retention_client=retention_client,
        background_optimizer=background_optimizer,
        hasher=hasher,
        digests=Digests(engine, settings.digest_interval, known_digests),
    )


def _make_saver(world: World, tiers: Tiers, bubbles: BubbleGate | None, buffers: KeptBuffers, hasher: Hasher) -> Saver:
    return Saver(
        world.rank,
        world.device,
        tiers.memory,
        tiers.storage,
        gate=bubbles,
        kept=buffers,
        check=check_generation,
        hashes=hasher.digests,
    )


def _open_upstream_log(engine: Engine, settings: Settings, tiers: Tiers, undo: ExitStack) -> PipelineTap:
    """Opens this worker's upstream log in its node's memory; a collective call.  Closes it with ``undo``."""
    claim = tiers.storage.storage.claim
    assert claim is not None  # every tier of a session has one
    directory = memory_of(settings, engine.world, tiers.nodes, claim).root
    run_on_all(lambda: engine.tap.open(directory), "cannot keep upstream logs")
    undo.callback(engine.tap.close)
    return engine.tap


def close(components: Components, patience_s: float) -> None:
    """Ends pending work, a storage write within ``patience_s`` seconds; communicates with no other worker."""
    if components.background_optimizer is not None:
        components.background_optimizer.close()
    if components.peers is not None:
        components.peers.close()
    components.retention_client.close()
    components.hasher.close()  # before the saver, which would wait for a hanging hasher
    components.saver.close(patience_s)
    components.committer.close(patience_s)
    if components.tokens is not None:
        components.tokens.close()
    if components.upstream is not None:
        components.upstream.close()


def stage_replicas_of(engine: Engine, policy: Policy) -> StageReplicas:
    """Returns the replica descriptors of this pipeline stage's workers; replicas are in the same stage."""
    state, gradients = engine.state, (Detail.GRAD,) if Capability.GRADIENTS in policy.requires else ()
    descriptors = [
        descriptor
        for detail in (Detail.FULL, Detail.MASTER, Detail.MOMENTS, Detail.COMPUTE, *gradients)
        for descriptor in describe_replicas(state.fragments(state.operators(), detail), detail)
    ]
    return StageReplicas(
        {
            rank: unpack_descriptors(text)
            for rank, text in gather((engine.world.rank, pack_descriptors(descriptors)), engine.peers)
        }
    )


def _redundancy(engine: Engine, stage_replicas: StageReplicas, tiers: Tiers, policy: Policy) -> Redundancy:
    """Returns the replicated state that several nodes save in their memory; empty without a memory tier."""
    if tiers.memory is None or len(set(tiers.nodes)) == 1:
        return Redundancy()
    is_first = engine.world.rank == min(
        stage_replicas.ranks
    )  # the other workers of its stage have the same descriptors
    return redundancy(
        gather(replicated_operators(stage_replicas, full_plan(policy, 0).operators, tiers.nodes) if is_first else {})
    )


def check_saving(engine: Engine, tiers: Tiers, tier: str) -> None:
    """Refuses state that snapshots in memory cannot restore; a collective call.

    Raises:
        CheckpointError: on all workers, for such state.
    """
    if tiers.memory is not None:
        run_on_all(lambda: check_nodes(engine.slices, tiers, tier), "cannot keep snapshots in memory")


def may_replay(engine: Engine, components: Components, tier: str) -> bool:
    """Whether iterations of this model can be replayed here with frozen operators; a collective call."""
    try:
        check_saving(engine, components.tiers, tier)
        check_freezing(engine.state)
    except CheckpointError:
        return False
    return True
