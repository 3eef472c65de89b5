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
from moc.session.helpers import Carriers, Folds, Hasher
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
from moc.snapshot.device_copy import bubbles_on
from moc.snapshot.saver import Saver
from moc.state.operators import Detail
from moc.store.errors import CheckpointError


@dataclass(frozen=True)
class Components:
    """Components of one generation on one worker.

    Attributes:
        peers: copies snapshots to other nodes; None without ``--ckpt-tier peers``.
        tokens: token ledger; None if no policy needs it.
        carriers: carries experts from older snapshots in memory, if any may be older than the rest.
        folds: applies the gradients of chains in the background; None if the policy does not.
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
    carriers: Carriers
    folds: Folds | None
    hasher: Hasher
    digests: Digests


class SizesByPlan:
    """Implementation of :class:`moc.policy.interface.SnapshotSizer`."""

    def __init__(self, parts: Components):
        self._contents, self._rank = parts.contents, parts.world.rank
        names = list(dict.fromkeys(parts.tiers.nodes))
        self.nodes = tuple(map(names.index, parts.tiers.nodes))
        self.replicas = parts.peers.replicas if parts.peers is not None else 0

    def __call__(self, operators: Mapping[str, Detail]) -> int:
        """Returns the bytes of operators, each at its detail, on the rank that saves the most; a collective call."""
        return max(gather(max(self._contents.loads(operators).values(), default=0)))

    def by_rank(self, plans: Mapping[str, Mapping[str, Detail]]) -> dict[str, dict[int, int]]:
        """Returns the bytes of each rank by plan, if not 0; a collective call."""
        loads = {name: self._contents.loads(plan).get(self._rank, 0) for name, plan in plans.items()}
        mine = {name: amount for name, amount in loads.items() if amount}
        found: dict[str, dict[int, int]] = {name: {} for name in plans}
        for rank, its in enumerate(gather(mine)):
            for name, amount in its.items():
                found[name][rank] = amount
        return found


def build(
    engine: Engine,
    settings: Settings,
    policy: Policy,
    tiers: Tiers,
    log: Listener,
    *,
    counts: bool,
    again: bool,
    kept: KeptBuffers,
    known: KnownDigests,
) -> Components:
    """Builds the components of a generation; a collective call.

    Without ``counts``, there is no token ledger.  ``again`` means that this worker was in an earlier generation, whose
    buffers are in ``kept``.  ``known`` has the digests that this worker knows.

    Raises:
        CheckpointError: on all workers: such snapshots cannot restore this state, or memory is insufficient.
        SettingsError: the settings do not fit the job.
    """
    world = engine.world
    with ExitStack() as undo:  # if a worker is lost meanwhile, all workers build again
        holdings = holdings_of(engine, policy)
        alike = _redundancy(engine, holdings, tiers, policy)
        carriers = undo.enter_context(closing(Carriers()))
        peers = join_peers(settings, tiers, policy, alike, carriers, log, again) if settings.tier == "peers" else None
        if peers is not None:
            undo.callback(peers.close)
        check_saving(engine, tiers, settings.tier)
        committer = undo.enter_context(closing(Committer(world, policy, tiers, engine.layout, log, alike.copies)))
        tokens = undo.enter_context(closing(TokenTracker(engine, settings.train_iters, policy))) if counts else None
        upstream = _open_upstream_log(engine, settings, tiers, undo) if settings.upstream_logging else None
        nodes = tiers.nodes if tiers.memory is not None else ()
        contents = Contents(engine.state, holdings, world.rank, parse_scheme(settings.sharding), nodes)
        bubbles = engine.tap.bubbles = bubbles_on(world.device) if Capability.BUBBLES in policy.requires else None
        hasher = undo.enter_context(closing(Hasher()))
        saver = Saver(
            world.rank,
            world.device,
            tiers.memory,
            tiers.storage,
            gate=bubbles,
            kept=kept,
            check=check_generation,
            hashes=hasher.digests,
        )
        undo.callback(saver.close)
        folds = Folds() if Capability.BACKGROUND_UPDATES in policy.requires else None
        if peers is not None and peers.replicas == 1:  # several copies of a node's snapshots would have different bases
            peers.folds = folds
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
        carriers=carriers,
        folds=folds,
        hasher=hasher,
        digests=Digests(engine, settings.digest_interval, known),
    )


def _open_upstream_log(engine: Engine, settings: Settings, tiers: Tiers, undo: ExitStack) -> PipelineTap:
    """Opens this worker's upstream log in its node's memory; a collective call.  Closes it with ``undo``."""
    claim = tiers.storage.storage.claim
    assert claim is not None  # every tier of a session has one
    directory = memory_of(settings, engine.world, tiers.nodes, claim).root
    run_on_all(lambda: engine.tap.open(directory), "cannot keep upstream logs")
    undo.callback(engine.tap.close)
    return engine.tap


def close(parts: Components, patience_s: float) -> None:
    """Ends pending work, a storage write within ``patience_s`` seconds; communicates with no other worker."""
    if parts.folds is not None:
        parts.folds.close()
    if parts.peers is not None:
        parts.peers.close()
    parts.carriers.close()
    parts.hasher.close()  # before the saver, which would wait for a hanging hasher
    parts.saver.close(patience_s)
    parts.committer.close(patience_s)
    if parts.tokens is not None:
        parts.tokens.close()
    if parts.upstream is not None:
        parts.upstream.close()


def holdings_of(engine: Engine, policy: Policy) -> StageReplicas:
    """Returns the replica descriptors of this pipeline stage's workers; replicas are in the same stage."""
    state, gradients = engine.state, (Detail.GRAD,) if Capability.GRADIENTS in policy.requires else ()
    told = [
        holding
        for detail in (Detail.FULL, Detail.MASTER, Detail.MOMENTS, Detail.COMPUTE, *gradients)
        for holding in describe_replicas(state.fragments(state.operators(), detail), detail)
    ]
    return StageReplicas(
        {
            rank: unpack_descriptors(text)
            for rank, text in gather((engine.world.rank, pack_descriptors(told)), engine.peers)
        }
    )


def _redundancy(engine: Engine, holdings: StageReplicas, tiers: Tiers, policy: Policy) -> Redundancy:
    """Returns the replicated state that several nodes save in their memory; empty without a memory tier."""
    if tiers.memory is None or len(set(tiers.nodes)) == 1:
        return Redundancy()
    first = engine.world.rank == min(holdings.ranks)  # the other workers of its stage have the same descriptors
    return redundancy(
        gather(replicated_operators(holdings, full_plan(policy, 0).operators, tiers.nodes) if first else {})
    )


def check_saving(engine: Engine, tiers: Tiers, tier: str) -> None:
    """Refuses state that snapshots in memory cannot restore; a collective call.

    Raises:
        CheckpointError: on all workers, for such state.
    """
    if tiers.memory is not None:
        run_on_all(lambda: check_nodes(engine.slices, tiers, tier), "cannot keep snapshots in memory")


def may_replay(engine: Engine, parts: Components, tier: str) -> bool:
    """Whether iterations of this model can be replayed here with frozen operators; a collective call."""
    try:
        check_saving(engine, parts.tiers, tier)
        check_freezing(engine.state)
    except CheckpointError:
        return False
    return True
