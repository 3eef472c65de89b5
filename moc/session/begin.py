"""Where a run begins: from a snapshot, a ``--load`` checkpoint or nothing; and what takes its snapshots from there."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from moc.policy import Policy
from moc.recovery.changes import in_storage_alone, is_of
from moc.recovery.retention import experts_staying, staying
from moc.recovery.sources import MEMORY, STORAGE
from moc.runtime.agreement import gather, run_on_all, run_on_rank0
from moc.runtime.world import World
from moc.session.claims import claimed, take_places
from moc.session.elsewhere import NOWHERE, Chooser, Elsewhere
from moc.session.engine import Engine, Listener
from moc.session.peers import Peers, join_peers
from moc.session.publishing import Publisher
from moc.session.report import SnapshotReport
from moc.session.resume.loading import ResumeResult, SnapshotLoader
from moc.session.resume.repair import Repair
from moc.session.resume.replay import Replayer, check_freezing
from moc.session.resume.survivors import LocalRemains, Survivors, publish_what_is_whole, survivors
from moc.session.resume.tidying import tidy_memory, tidy_storage
from moc.session.settings import Settings
from moc.session.snapshots import ResumePoint, Snapshots
from moc.session.storage_health import StorageHealth
from moc.session.tiers import LOOKING_S, Tiers, check_nodes, memory_of, tiers_of
from moc.session.tokens import TokenTracker
from moc.sharding import scheme_named
from moc.sharding.shares import StageHoldings, describe, pack, unpack
from moc.snapshot.contents import Contents
from moc.snapshot.saver import Saver
from moc.state.detail import Detail
from moc.state.record import Position, StepRecord
from moc.store.errors import CheckpointError

_LATE_AFTER = 100  # iterations; where it is not asked for how often something goes to storage


class NoRecoveryPoint(Exception):
    """There is no snapshot, and this worker's model has been trained since it was built: build it again."""


def begin(
    engine: Engine,
    settings: Settings,
    policy: Policy | None,
    log: Listener,
    remains: LocalRemains,
    elsewhere: Elsewhere = NOWHERE,
    chooser: Chooser | None = None,
) -> tuple[Position, Snapshots]:
    """Brings all workers to the newest state that there is; a collective call.

    Args:
        engine: computes iterations.
        settings: where snapshots go, and how.
        policy: what is in them and when; None where something chooses.
        log: where to report.
        remains: what this worker has left.
        elsewhere: what to begin from where there is no snapshot.
        chooser: chooses policy and settings, if they are not given.

    Returns:
        Where the run begins, and what takes snapshots from there.

    Raises:
        CheckpointError: on all workers: nothing whole to load although there is something, another model, another
            job in the same directory, no memory for snapshots.
        NoRecoveryPoint: there is no snapshot, and the model is not as it was built any more.
    """
    mine = remains if remains.trained else None
    world, tap = engine.world, engine.tap
    claim = claimed(settings, world, mine, log)
    tiers = tiers_of(settings, world, claim)
    beside = take_places(settings, tiers, world, mine is not None, log)
    if chooser is not None:
        settings, policy = chooser.in_force(engine, tiers, mine)
        tiers = dataclasses.replace(tiers_of(settings, world, claim), storage=tiers.storage)
    assert policy is not None  # given, or chosen
    with contextlib.ExitStack() as undo:  # a worker may be lost meanwhile, and then all begin again
        counts = policy.counts_tokens or chooser is not None and chooser.counts_tokens
        peers = join_peers(settings, tiers, policy, log, mine is not None)
        if peers is not None:
            undo.callback(peers.close)
        stage = _stage(engine)
        _check_saving(engine, stage, tiers, settings.tier, policy, policy.replays)
        publisher = Publisher(world, policy, tiers, engine.layout, log)
        undo.callback(publisher.close)
        tokens = TokenTracker(engine, settings.train_iters, policy.counts_probabilities) if counts else None
        if tokens is not None:
            undo.callback(tokens.close)
        its = _Setting(tiers, peers, policy, stage, publisher, tokens, beside)
        if settings.upstream_logging:
            logs = memory_of(settings, world, its.tiers.nodes, claim).root
            run_on_all(lambda: tap.open(logs), "cannot keep upstream logs")
            undo.callback(tap.close)
        saved = Contents(engine.state, its.stage, world.rank, scheme_named(settings.sharding))
        loader = SnapshotLoader(
            engine=engine,
            only=settings.begin_at,
            tiers=its.tiers,
            policy=its.policy,
            tokens=its.tokens,
            repair=Repair(world, saved, its.tiers),
            log=log,
            replayer=Replayer(engine, remains.progress),
            records=remains.records,
        )
        left = survivors(remains, engine)
        start = _go_on(its, loader, elsewhere, world, log, left, mine)
        storage = _storage(settings, its, world, start, log)
        its.policy.on_sizes(busiest := lambda operators: max(gather(saved.busiest(operators))))
        if chooser is not None:
            chooser.on_sizes(busiest, engine, lambda: _may_replay(settings, engine, its))
        saver = Saver(world.rank, world.device, its.tiers.memory, its.tiers.storage)
        undo.callback(saver.close)
        report = SnapshotReport(log, settings.tier)
        if mine is None and chooser is None:
            report.expected(its.policy, settings)
        snapshots = Snapshots(
            world=world,
            policy=its.policy,
            contents=saved,
            saver=saver,
            publisher=its.publisher,
            tiers=its.tiers,
            peers=its.peers,
            describe=_describer(engine, its.policy, its.tokens, chooser),
            blocking=settings.blocking,
            most_behind=settings.most_behind,
            start=start,
            tokens=its.tokens,
            tap=tap,
            report=report,
            storage=storage,
            stops=settings.stops,
            observe=(lambda seen: None) if chooser is None else chooser.observe,
        )
        snapshots.reserve()
        snapshots.take_again()
        undo.pop_all()
    return start.position, snapshots


@dataclass(frozen=True)
class _Setting:
    """What snapshots are taken and recovered with.

    Attributes:
        tiers: where they go.
        peers: what copies them to other nodes, if anything does.
        policy: when what of it is.
        stage: who holds what, in this pipeline stage.
        publisher: makes them count.
        tokens: the token ledger, where the policy wants one.
        beside: storage is made ready beside training, since the job goes on from memory.
    """

    tiers: Tiers
    peers: Peers | None
    policy: Policy
    stage: StageHoldings
    publisher: Publisher
    tokens: TokenTracker | None
    beside: bool


def _go_on(
    its: _Setting,
    loader: SnapshotLoader,
    elsewhere: Elsewhere,
    world: World,
    log: Listener,
    left: Survivors,
    mine: LocalRemains | None,
) -> ResumePoint:
    """Brings the state to where the run goes on, and removes what it will take anew."""
    publish_what_is_whole(left, its.tiers, its.publisher, world)
    if its.peers is not None:
        its.peers.restore(log)
    held = loader.find(left)
    oldest = elsewhere.newest(LOOKING_S if loader.has_memory_of(left) and held else None)
    loaded = loader.load(held, oldest=oldest, left=left, mine=mine)
    if mine is not None and not loaded:
        raise NoRecoveryPoint
    if loaded and loaded.plan.stages:  # they have saved again what some of them had lost
        publish_what_is_whole(left, its.tiers, its.publisher, world)
        loaded = dataclasses.replace(loaded, held=loader.find_again())
    start = _from(loaded, its, left) if loaded else ResumePoint(elsewhere.load() or Position())
    if its.tokens is not None and not loaded:
        its.tokens.starts_at(start.position.iteration)
    if its.peers is not None:
        its.peers.goes_on_from(sorted({*start.in_memory, *start.experts}), log)
    run_on_all(lambda: tidy_memory(its.tiers, start), "cannot tidy up old snapshots")
    if not its.beside:
        tidy = lambda: its.publisher.beside(lambda: tidy_storage(its.tiers, start)).result()  # noqa: E731
        run_on_rank0(tidy, "cannot tidy up old snapshots")
    return start


def _storage(settings: Settings, its: _Setting, world: World, start: ResumePoint, log: Listener) -> StorageHealth:
    """How storage fares; if the job goes on from memory, nothing waits until it is taken and tidied up."""

    def make_ready() -> None:
        its.tiers.storage.take()
        tidy_storage(its.tiers, start)

    prepares, asked = its.beside and world.rank == 0, settings.persist_interval
    return StorageHealth(
        name=its.tiers.storage.place.name,
        every=its.tiers.persist_interval if its.tiers.memory is not None else None,
        late_after=asked or _LATE_AFTER,
        newest=None if start.newest in start.in_memory else start.newest,
        log=log,
        prepare=(lambda: its.publisher.beside(make_ready)) if prepares else None,
    )


def _from(loaded: ResumeResult, its: _Setting, left: Survivors) -> ResumePoint:
    """What there is when a run goes on; the policy learns whether its window does."""
    policy, tier, at = its.policy, MEMORY if its.tiers.memory is not None else STORAGE, loaded.position.iteration
    there = staying(loaded.held, policy.operators, policy.exact, tier, at, policy.under_way(at))
    if not there.goes_on:
        policy.begin_anew()
    begun = {iteration: one for iteration, one in left.begun.items() if iteration in there.in_memory}
    if policy.exact:
        stays = experts_staying((), there.in_memory, at)
    else:
        way = loaded.plan.way
        assert way is not None  # only exact policies go on from live state alone
        stays = experts_staying(way.used(), there.in_memory, at)
        in_order = not stays.newer and not stays.before and (tier == STORAGE or at in there.in_memory)
        policy.on_resume(in_order and is_of(policy, way), in_storage_alone(loaded.held, policy))
    return ResumePoint(
        loaded.position,
        loaded.record,
        there.newest,
        there.in_memory,
        *stays,
        again=there.again,
        begun=begun,
    )


def _describer(
    engine: Engine, policy: Policy, tokens: TokenTracker | None, chooser: Chooser | None
) -> Callable[[Position, StepRecord | None], dict]:
    """What of the state is not a tensor, at a position."""
    return lambda at, record: {
        **engine.scalars(at),
        "record": None if record is None else dataclasses.asdict(record),
        "policy": policy.name,
        "interval": policy.interval.state_dict(),
        "policy_state": policy.state_dict(),
        "ledger": tokens.state_dict() if tokens is not None else None,
        "auto": chooser.state_dict() if chooser is not None else None,
    }


def _may_replay(settings: Settings, engine: Engine, its: _Setting) -> bool:
    try:
        _check_saving(engine, its.stage, its.tiers, settings.tier, its.policy, replays=True)
    except CheckpointError:
        return False
    return True


def _stage(engine: Engine) -> StageHoldings:
    """What the workers of this pipeline stage hold: they are all that may hold copies of one another."""
    state = engine.state
    told = [
        holding
        for detail in (Detail.FULL, Detail.MASTER, Detail.MOMENTS, Detail.COMPUTE)
        for holding in describe(state.fragments(state.operators(), detail), detail)
    ]
    return StageHoldings({rank: unpack(text) for rank, text in gather((engine.world.rank, pack(told)), engine.peers)})


def _check_saving(engine: Engine, stage: StageHoldings, tiers: Tiers, tier: str, policy: Policy, replays: bool) -> None:
    """Refuses, on all workers, what the snapshots of a policy cannot bring back."""
    if tiers.memory is not None:
        items = stage.items(policy.everything(0).operators)
        run_on_all(lambda: check_nodes(items, engine.slices, tiers, tier), "cannot keep snapshots in memory")
    if replays:
        check_freezing(engine.state)
