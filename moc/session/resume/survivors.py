"""What workers that have outlived others still have, as all workers know it when they have met again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from moc.recovery.replicas import pieces
from moc.recovery.scope import Logs
from moc.runtime.agreement import gather, run_on_all
from moc.runtime.world import World
from moc.session.engine import Engine
from moc.session.publishing import Publisher
from moc.session.resume.replay import ReplayProgress
from moc.session.tiers import Tiers
from moc.state.detail import Detail
from moc.state.record import Position, Records
from moc.store.store import Store

_PROBLEM = "cannot publish what all workers had saved"


@dataclass(frozen=True)
class LiveState:
    """The state that a worker has between two iterations, apart from its tensors.

    Attributes:
        position: how far it has come.
        state: what is not a tensor, as snapshots hold it.
    """

    position: Position
    state: Mapping


@dataclass(frozen=True)
class StartedSnapshot:
    """A snapshot of late, of which some worker may not have saved its part, or told.

    Attributes:
        operators: what was to be saved of the whole model.
        state: what of it is not a tensor.
    """

    operators: Mapping[str, Detail]
    state: dict


@dataclass
class LocalRemains:
    """What a worker has left when another one is lost.

    Attributes:
        trained: its state is not that which was built any more.
        live: its state, as long as it is whole.
        begun: by iteration, the last snapshots that it has begun.
        run: of which run the snapshots are, if it knows.
        records: of the iterations of late.
        progress: how far it has come with computing iterations again, as long as that is not over.
    """

    trained: bool = False
    live: LiveState | None = None
    begun: Mapping[int, StartedSnapshot] = field(default_factory=dict)
    run: str | None = None
    records: Records = field(default_factory=Records)
    progress: ReplayProgress = field(default_factory=ReplayProgress)


@dataclass(frozen=True)
class Survivors:
    """What is left in the workers.

    Attributes:
        again: the job has trained already, if only in workers that are lost.
        live: by rank the iteration that its state is at; new workers have none.
        states: by iteration, what is not a tensor, from the first worker that is there.
        begun: by iteration the last snapshots, some of which a lost worker may not have saved or published.
        pieces: by rank and operator what it holds: see :class:`moc.recovery.plan.JobInventory`.
        steps: by iteration and operator, the updates that its moments have seen.
        logs: of what passed between pipeline stages; None where nothing is logged.
    """

    again: bool = False
    live: Mapping[int, int] = field(default_factory=dict)
    states: Mapping[int, dict] = field(default_factory=dict)
    begun: Mapping[int, StartedSnapshot] = field(default_factory=dict)
    pieces: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    steps: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    logs: Logs | None = None

    def only(self, ranks: Collection[int]) -> Survivors:
        """The same, if only these ranks have their state left, and nobody that of a replay."""
        logs = self.logs and replace(self.logs, replayed={})
        return replace(self, live={rank: at for rank, at in self.live.items() if rank in ranks}, logs=logs)

    def without_logs(self, damaged: Mapping[int, Collection[int]]) -> Survivors:
        """The same, if the logs that some ranks have of some iterations were not there."""
        assert self.logs is not None  # they are damaged
        kept = {rank: set(there) - set(damaged.get(rank, ())) for rank, there in self.logs.kept.items()}
        return replace(self, logs=replace(self.logs, kept=kept))


def survivors(remains: LocalRemains, engine: Engine) -> Survivors:
    """Tells all what this worker has left, and hears the same of the others; a collective call.

    Args:
        remains: what this one has left.
        engine: of this worker.
    """
    world = engine.world
    own = remains.live if remains.trained else None
    at = own.position.iteration if own is not None else None
    told = gather((remains.trained, at))
    again = any(trained for trained, _ in told)
    live = {rank: iteration for rank, (_, iteration) in enumerate(told) if iteration is not None}
    begun = _of_first(remains.begun if remains.trained else {}, world)
    if not live:
        return Survivors(again, begun=begun)
    speaks = own is not None and world.rank == min(rank for rank, other in live.items() if other == at)
    states = dict(one for one in gather((at, own.state) if own is not None and speaks else None) if one is not None)
    steps: dict[int, dict[str, int]] = {iteration: {} for iteration in states}
    for rank, counted in enumerate(gather(engine.state.steps())):
        if rank in live:
            steps[live[rank]] |= counted
    logs = _logs(engine, remains.records, remains.progress) if engine.tap.feeds else None
    return Survivors(again, live, states, begun, dict(enumerate(gather(pieces(engine.state)))), steps, logs)


def _of_first(mine: Mapping[int, StartedSnapshot], world: World) -> dict[int, StartedSnapshot]:
    """Of each iteration, what the first worker has that has something."""
    has = list(enumerate(gather(sorted(mine))))
    first = {iteration: rank for rank, iterations in reversed(has) for iteration in iterations}
    told = gather({iteration: mine[iteration] for iteration, rank in first.items() if rank == world.rank})
    return {iteration: begun for one in told for iteration, begun in one.items()}


def _logs(engine: Engine, records: Records, progress: ReplayProgress) -> Logs:
    mine = engine.world.pipeline_rank, engine.tap.kept(), engine.reduced, progress.told, records.iterations()
    stages, kept, reduced, replayed, known = (dict(enumerate(told)) for told in zip(*gather(mine), strict=True))
    return Logs(
        stages=stages,
        feeds=engine.tap.feeds,
        kept=kept,
        reduced={rank: iteration for rank, iteration in reduced.items() if iteration is not None},
        records=set().union(*known.values()),
        replayed={rank: state for rank, state in replayed.items() if state is not None},
    )


def publish_what_is_whole(left: Survivors, tiers: Tiers, publisher: Publisher, world: World) -> None:
    """Makes a checkpoint of what every worker had saved, the lost ones too, before it was known; a collective call.

    A snapshot counts when the vote of the next iteration has told that all have copied it.  That vote was cut off, or
    who was to publish is lost, but the parts tell themselves, and so the job need not go back to the snapshot before.
    """
    in_memory = tiers.memory is not None
    store, ranks = (tiers.storage, range(world.size)) if tiers.memory is None else (tiers.memory, tiers.node)
    publishes = tiers.leads_node if in_memory else world.rank == 0
    begun = {iteration: one.state for iteration, one in left.begun.items()}
    for iteration, state in sorted({**begun, **left.states}.items()):
        whole = not publishes or store.has_all(iteration, ranks)
        if all(gather(whole)):
            run_on_all(
                partial(_publish, publisher, store, iteration, state, ranks) if publishes else _nothing, _PROBLEM
            )


def _publish(publisher: Publisher, store: Store, iteration: int, state: dict, ranks: Iterable[int]) -> None:
    if iteration not in store.iterations():
        publisher.reported(store, iteration, state, ranks)


def _nothing() -> None:
    """Another worker publishes."""
