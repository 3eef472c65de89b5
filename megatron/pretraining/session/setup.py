"""Where a run begins: from a snapshot, a ``--load`` checkpoint or nothing; and what takes its snapshots from there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.pretraining.checkpoint.dense import Checkpoints
from megatron.pretraining.config import Config
from megatron.pretraining.logging.log import Log
from megatron.pretraining.session.auto import Auto
from megatron.pretraining.session.none import NoSnapshots
from megatron.pretraining.session.settings import policy_of, settings_of
from moc.policy import Policy
from moc.recovery.carrying import Carrier
from moc.recovery.changes import in_storage_alone, is_of
from moc.recovery.retention import experts_staying, staying
from moc.recovery.sources import MEMORY, STORAGE
from moc.runtime import environment
from moc.runtime.agreement import gather, run_on_all, run_on_rank0
from moc.runtime.world import World
from moc.session.claims import claimed, take_places
from moc.session.engine import Engine
from moc.session.peers import Peers, join_peers
from moc.session.publishing import Publisher
from moc.session.report import SnapshotReport
from moc.session.resume.loading import Loaded, SnapshotLoader
from moc.session.resume.repair import Repair
from moc.session.resume.replay import Progress, Replayer, check_freezing
from moc.session.resume.survivors import Left, Survivors, publish_what_is_whole, survivors
from moc.session.settings import Settings, SettingsError
from moc.session.snapshots import Snapshots, Start
from moc.session.storage import Storage
from moc.session.tiers import LOOKING_S, Tiers, check_nodes
from moc.session.tokens import TokenTracker
from moc.sharding import scheme_named
from moc.sharding.shares import Stage, describe, pack, unpack
from moc.snapshot.contents import Contents
from moc.snapshot.saver import Saver
from moc.state.detail import Detail
from moc.state.record import Position, Records, StepRecord
from moc.store.claims import Claim
from moc.store.errors import CheckpointError
from moc.store.locate import place_of
from moc.store.places import LocalPlace
from moc.store.store import Store
from moc.store.tiers import memory_place

_LATE_AFTER = 100  # iterations; where it is not asked for how often something goes to storage


class NothingToGoOnFrom(Exception):
    """There is no snapshot, and this worker's model has been trained since it was built: build it again."""


def begin(
    config: Config,
    engine: Engine,
    checkpoints: Checkpoints,
    log: Log,
    progress: Progress,
    records: Records,
    mine: Left | None = None,
    auto: Auto | None = None,
) -> tuple[Position, Snapshots | NoSnapshots]:
    """Brings all workers to the newest state that there is; a collective call.

    Args:
        config: the flags in force.
        engine: computes iterations.
        checkpoints: the dense ones.
        log: where to report.
        progress: how far this worker has come with computing iterations again, as long as that is not over.
        records: of iterations of late, as far as this worker knows them.
        mine: what this worker has left of the state; None if it has not trained yet.
        auto: what chooses the policy, if the flags do not.

    Returns:
        Where to go on, and what takes snapshots from there.

    Raises:
        CheckpointError: on all workers: nothing whole to load although there is something, another model, another
            job in the same directory, no memory for snapshots.
        NothingToGoOnFrom: there is no snapshot, and the model is not as it was built any more.
    """
    if config.snapshot.ckpt_policy is None:
        if mine is not None:
            raise NothingToGoOnFrom
        return checkpoints.load() or Position(), NoSnapshots()
    world, tap = engine.world, engine.tap
    settings = settings_of(config, world.size)
    claim = claimed(settings, world, mine, log)
    tiers = _tiers(settings, world, claim)
    beside = take_places(settings, tiers, world, mine is not None, log)
    if auto is not None:
        config = auto.in_force(tiers, mine, first=world.rank == 0)
        settings = settings_of(config, world.size)
        tiers = dataclasses.replace(_tiers(settings, world, claim), storage=tiers.storage)
    with contextlib.ExitStack() as undo:  # a worker may be lost meanwhile, and then all begin again
        counts = auto is not None and auto.counts_tokens
        its = _setting(config, settings, engine, log, mine is not None, counts, tiers, undo, beside)
        if settings.upstream_logging:
            logs = _memory(settings, world, its.tiers.nodes, claim).root
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
            replayer=Replayer(engine, progress),
            records=records,
        )
        left = survivors(mine, engine, records, progress)
        start = _go_on(its, loader, checkpoints, world, log, left, mine)
        storage = _storage(settings, its, world, start, log)
        its.policy.sized(busiest := lambda operators: max(gather(saved.busiest(operators))))
        if auto is not None:
            ep = config.parallel.expert_model_parallel_size
            auto.sized(busiest, its.policy.operators, ep, engine.stages, lambda: _may_replay(settings, engine, its))
        saver = Saver(world.rank, world.device, its.tiers.memory, its.tiers.storage)
        undo.callback(saver.close)
        report = SnapshotReport(log, settings.tier)
        if mine is None and auto is None:
            report.expected(its.policy, settings)
        snapshots = Snapshots(
            world=world,
            policy=its.policy,
            contents=saved,
            saver=saver,
            publisher=its.publisher,
            tiers=its.tiers,
            peers=its.peers,
            describe=_describer(engine, its.policy, its.tokens, auto),
            blocking=settings.blocking,
            most_behind=settings.most_behind,
            start=start,
            tokens=its.tokens,
            tap=tap,
            report=report,
            storage=storage,
            stops=settings.stops,
            observe=(lambda seen: None) if auto is None else auto.observe,
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
    stage: Stage
    publisher: Publisher
    tokens: TokenTracker | None
    beside: bool


def _setting(
    config: Config,
    settings: Settings,
    engine: Engine,
    log: Log,
    again: bool,
    counts_tokens: bool,
    tiers: Tiers,
    undo: contextlib.ExitStack,
    beside: bool,
) -> _Setting:
    policy = policy_of(config, engine)
    peers = join_peers(settings, tiers, policy, log, again)
    if peers is not None:
        undo.callback(peers.close)
    stage = _stage(engine)
    _check_saving(engine, stage, tiers, settings.tier, policy, policy.replays)
    publisher = Publisher(engine.world, policy, tiers, engine.layout, log)
    undo.callback(publisher.close)
    tokens = None
    if counts_tokens or policy.counts_tokens:
        tokens = TokenTracker(engine, settings.train_iters, policy.counts_probabilities)
        undo.callback(tokens.close)
    return _Setting(tiers, peers, policy, stage, publisher, tokens, beside)


def _go_on(
    its: _Setting,
    loader: SnapshotLoader,
    checkpoints: Checkpoints,
    world: World,
    log: Log,
    left: Survivors,
    mine: Left | None,
) -> Start:
    """Brings the state to where the run goes on, and removes what it will take anew."""
    publish_what_is_whole(left, its.tiers, its.publisher, world)
    if its.peers is not None:
        its.peers.restore(log)
    held = loader.find(left)
    oldest = checkpoints.newest(LOOKING_S if loader.has_memory_of(left) and held else None)
    loaded = loader.load(held, oldest=oldest, left=left, mine=mine)
    if mine is not None and not loaded:
        raise NothingToGoOnFrom
    if loaded and loaded.plan.stages:  # they have saved again what some of them had lost
        publish_what_is_whole(left, its.tiers, its.publisher, world)
        loaded = dataclasses.replace(loaded, held=loader.find_again())
    start = _from(loaded, its, left) if loaded else Start(checkpoints.load() or Position())
    if its.tokens is not None and not loaded:
        its.tokens.starts_at(start.position.iteration)
    if its.peers is not None:
        its.peers.goes_on_from(sorted({*start.in_memory, *start.experts}), log)
    run_on_all(lambda: _tidy_memory(its.tiers, start), "cannot tidy up old snapshots")
    if not its.beside:
        tidy = lambda: its.publisher.beside(lambda: _tidy_storage(its.tiers, start)).result()  # noqa: E731
        run_on_rank0(tidy, "cannot tidy up old snapshots")
    return start


def _storage(settings: Settings, its: _Setting, world: World, start: Start, log: Log) -> Storage:
    """How storage fares; if the job goes on from memory, nothing waits until it is taken and tidied up."""

    def make_ready() -> None:
        its.tiers.storage.take()
        _tidy_storage(its.tiers, start)

    prepares, asked = its.beside and world.rank == 0, settings.persist_interval
    return Storage(
        name=its.tiers.storage.place.name,
        every=its.tiers.persist_interval if its.tiers.memory is not None else None,
        late_after=asked or _LATE_AFTER,
        newest=None if start.newest in start.in_memory else start.newest,
        log=log,
        prepare=(lambda: its.publisher.beside(make_ready)) if prepares else None,
    )


def _from(loaded: Loaded, its: _Setting, left: Survivors) -> Start:
    """What there is when a run goes on; the policy learns whether its window does."""
    policy, tier, at = its.policy, MEMORY if its.tiers.memory is not None else STORAGE, loaded.position.iteration
    there = staying(loaded.held, policy.operators, policy.exact, tier, at, policy.under_way(at))
    if not there.goes_on:
        policy.begin_anew()
    begun = {iteration: one for iteration, one in left.begun.items() if iteration in there.in_memory}
    stays = experts_staying(() if policy.exact else loaded.plan.way.used(), there.in_memory, at)
    if not policy.exact:
        in_order = not stays.newer and not stays.before and (tier == STORAGE or at in there.in_memory)
        policy.found(in_order and is_of(policy, loaded.plan.way), in_storage_alone(loaded.held, policy))
    return Start(
        loaded.position,
        loaded.record,
        there.newest,
        there.in_memory,
        *stays,
        again=there.again,
        begun=begun,
    )


def _describer(
    engine: Engine, policy: Policy, tokens: TokenTracker | None, auto: Auto | None
) -> Callable[[Position, StepRecord | None], dict]:
    """What of the state is not a tensor, at a position."""
    return lambda at, record: {
        **engine.scalars(at),
        "record": None if record is None else dataclasses.asdict(record),
        "policy": policy.name,
        "interval": policy.interval.state_dict(),
        "policy_state": policy.state_dict(),
        "ledger": tokens.state_dict() if tokens is not None else None,
        "auto": auto.state_dict() if auto is not None else None,
    }


def _may_replay(settings: Settings, engine: Engine, its: _Setting) -> bool:
    try:
        _check_saving(engine, its.stage, its.tiers, settings.tier, its.policy, replays=True)
    except CheckpointError:
        return False
    return True


def _tiers(settings: Settings, world: World, claim: Claim) -> Tiers:
    nodes = _nodes(settings.nodes, world)
    node = tuple(rank for rank, other in enumerate(nodes) if other == nodes[world.rank])
    memory = Store(_memory(settings, world, nodes, claim), slack=True) if settings.tier != "disk" else None
    return Tiers(
        storage=Store(place_of(settings.directory, claim)),
        memory=memory,
        nodes=tuple(nodes),
        leads_node=world.rank == node[0],
        node=node,
        persist_interval=1 if settings.persists_all and memory is not None else settings.persist_interval,
        keep=settings.keep,
    )


def _memory(settings: Settings, world: World, nodes: Sequence[str], claim: Claim) -> LocalPlace:
    """The memory of this node."""
    launched = os.environ.get(environment.NODE) if len(set(nodes)) > 1 else None  # several may be on one machine
    emulated = nodes[world.rank] if settings.nodes else launched
    return memory_place(settings.memory_directory, settings.directory, claim.run, emulated, claim)


def _nodes(told: str | None, world: World) -> list[str]:
    """By rank the node on which it is: what is told, its place in the job under our launcher, or the name of its host.

    Whoever takes the place of a lost node has the same ranks, and is given what others keep for them.
    """
    if told is None:
        return gather(os.environ["GROUP_RANK"] if environment.AGENT in os.environ else socket.gethostname())
    nodes = told.split(",")
    if len(nodes) != world.size:
        raise SettingsError(
            f"--node-of-rank names the nodes of {len(nodes)} workers, but there are {world.size}: name one for each."
        )
    return nodes


def _tidy_storage(tiers: Tiers, start: Start) -> None:
    """Takes out of the way what the run will take anew, and what killed jobs have left behind; on the first worker."""
    for newer in tiers.storage.iterations():
        if newer > start.position.iteration:
            tiers.storage.set_aside(newer)
    tiers.storage.clear_unpublished()


def _tidy_memory(tiers: Tiers, start: Start) -> None:
    """The same in the memory of this node."""
    if tiers.memory is not None and tiers.leads_node:
        tiers.memory.place.remove("slots")
        before = tiers.before
        for other in before.iterations():
            if other not in start.before:
                before.remove(other)
        for other in tiers.memory.iterations():
            if other in start.newer:
                before.remove(other)
                tiers.memory.move(other, before)
            elif other not in (*start.in_memory, *start.experts):
                tiers.memory.remove(other)
        Carrier(tiers.memory, ()).forget()
        tiers.memory.clear_unpublished()


def _stage(engine: Engine) -> Stage:
    """What the workers of this pipeline stage hold: they are all that may hold copies of one another."""
    state = engine.state
    told = [
        holding
        for detail in (Detail.FULL, Detail.MASTER, Detail.MOMENTS, Detail.COMPUTE)
        for holding in describe(state.fragments(state.operators(), detail), detail)
    ]
    return Stage({rank: unpack(text) for rank, text in gather((engine.world.rank, pack(told)), engine.peers)})


def _check_saving(engine: Engine, stage: Stage, tiers: Tiers, tier: str, policy: Policy, replays: bool) -> None:
    """Refuses, on all workers, what the snapshots of a policy cannot bring back."""
    if tiers.memory is not None:
        items = stage.items(policy.everything(0).operators)
        run_on_all(lambda: check_nodes(items, engine.slices, tiers, tier), "cannot keep snapshots in memory")
    if replays:
        check_freezing(engine.state)
