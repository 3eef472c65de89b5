"""Exchanges the state of surviving workers: first what each has, so that all know it, then what others need of it.

Survivors send state to replacements of the same part (replicas). Several pipeline stages can hold the same weights:
embeddings tied to the output layer. Only the first of these stages saves them, so no other node has them in its memory.
After loading, that stage sends them to the others, in any layout: ZeRO shards the same weights differently in each
stage.

Transfers boxes of tensors between workers, from any holder to any receiver. All workers know which worker has and
needs each box. So all compute the same transfers without communication.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from moc.recovery.plan import Logs, RankCopy
from moc.recovery.sources import AvailableCheckpoint
from moc.runtime.collectives import gather, group_for, run_on_all
from moc.runtime.job import World
from moc.session.digests import KnownDigests
from moc.session.engine import Engine
from moc.session.resume.replay import ReplayProgress
from moc.session.tiers import Tiers
from moc.snapshot.buffer_pool import KeptBuffers
from moc.state.digests import fragments_by_operator, part_ids
from moc.state.interface import TrainingState
from moc.state.operators import Detail, Fragment, Region
from moc.state.record import Position, Records
from moc.store.store import Store

CommitReported = Callable[[Store, int, dict, Iterable[int]], None]
"""Commits the parts of a snapshot that ranks have reported; takes store, iteration, non-tensor state and ranks."""

MOST = 64 << 20
"""Maximum bytes of one transfer."""


@dataclass(frozen=True)
class LiveState:
    """State of a worker between two iterations: its position, and the non-tensor state, as in snapshots."""

    position: Position
    state: Mapping


@dataclass(frozen=True)
class StartedSnapshot:
    """Planned operators of the model, and non-tensor state, of a snapshot that some worker may not have saved."""

    operators: Mapping[str, Detail]
    state: dict


@dataclass
class LocalRemains:
    """State that a worker keeps after the loss of another one.

    Attributes:
        trained: the model has been trained since it was built.
        live: its state; None if the state is not valid.
        begun: by iteration, the last snapshots that it started.
        run: id of the run that the snapshots belong to, if known.
        records: step records of recent iterations.
        progress: of an unfinished replay.
        buffers: of its snapshots, which the next generation uses again.
        workers: number of workers of the previous generation; 0 before the first.
        digests: digests of the state.
        stored: checkpoints in storage that the run has listed or committed.
        lacking: operators of this worker without state; they must be loaded.
    """

    trained: bool = False
    live: LiveState | None = None
    begun: Mapping[int, StartedSnapshot] = field(default_factory=dict)
    run: str | None = None
    records: Records = field(default_factory=Records)
    progress: ReplayProgress = field(default_factory=ReplayProgress)
    buffers: KeptBuffers = field(default_factory=KeptBuffers)
    workers: int = 0
    digests: KnownDigests = field(default_factory=KnownDigests)
    stored: tuple[AvailableCheckpoint, ...] = ()
    lacking: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Survivors:
    """State of all surviving workers.

    Attributes:
        has_trained: the job has trained already, if only in workers that are lost.
        live: by rank, the iteration of its state; new workers have none.
        states: by iteration, the non-tensor state, from the first worker that has it.
        begun: by iteration, recent snapshots that a lost worker may not have saved or committed.
        chunk_ids: by rank and operator, the name of its local chunks: see :class:`moc.recovery.plan.JobInventory`.
        steps: by iteration and operator, the updates that its moments have seen.
        logs: upstream logs; None without logging.
        reduced: by rank, the iteration whose reduced gradients it has; absent if there is none.
        resized: the number of workers has changed.
        stored: checkpoints in storage that the run has listed or committed.
        lacking: by rank, operators whose state it lacks, though it has the others.
    """

    has_trained: bool = False
    live: Mapping[int, int] = field(default_factory=dict)
    states: Mapping[int, dict] = field(default_factory=dict)
    begun: Mapping[int, StartedSnapshot] = field(default_factory=dict)
    chunk_ids: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    steps: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    logs: Logs | None = None
    reduced: Mapping[int, int] = field(default_factory=dict)
    resized: bool = False
    stored: tuple[AvailableCheckpoint, ...] = ()
    lacking: Mapping[int, frozenset[str]] = field(default_factory=dict)

    def only(self, ranks: Collection[int]) -> Survivors:
        """Returns a copy with state only on these ranks, and without replay progress."""
        logs = self.logs and replace(self.logs, replayed={})
        return replace(
            self, live={rank: iteration for rank, iteration in self.live.items() if rank in ranks}, logs=logs
        )

    def without_logs(self, damaged: Mapping[int, Collection[int]]) -> Survivors:
        """Returns a copy without the damaged logs, given as iterations by rank."""
        assert self.logs is not None  # they are damaged
        logged = {rank: set(iterations) - set(damaged.get(rank, ())) for rank, iterations in self.logs.kept.items()}
        return replace(self, logs=replace(self.logs, kept=logged))


def survivors(remains: LocalRemains, engine: Engine) -> Survivors:
    """Exchanges the surviving state of each worker; a collective call."""
    world = engine.world
    own = remains.live if remains.trained else None
    own_iteration = own.position.iteration if own is not None else None
    reports = gather((remains.trained, own_iteration, engine.reduced, remains.lacking, remains.workers))
    has_trained = any(trained for trained, *_ in reports)
    live = {rank: iteration for rank, (_, iteration, *_) in enumerate(reports) if iteration is not None}
    resized = any(workers not in (0, world.size) for *_, workers in reports)
    started = _started_by_first(remains.begun if remains.trained and not resized else {}, world)
    first_trained = next((rank for rank, (trained, *_) in enumerate(reports) if trained), None)
    stored = next(filter(None, gather(remains.stored if world.rank == first_trained else ())), ())
    if not live:
        return Survivors(has_trained, begun=started, resized=resized, stored=stored)
    contributes = own is not None and world.rank == min(
        rank for rank, rank_iteration in live.items() if rank_iteration == own_iteration
    )
    states = dict(
        entry
        for entry in gather((own_iteration, own.state) if own is not None and contributes else None)
        if entry is not None
    )
    steps: dict[int, dict[str, int]] = {iteration: {} for iteration in states}
    for rank, counted in enumerate(gather(engine.state.steps())):
        if rank in live:
            steps[live[rank]] |= counted
    logs = _logs(engine, remains.records, remains.progress) if engine.tap.feeds else None
    chunk_ids = dict(enumerate(gather(part_ids(engine.state))))
    reduced = {rank: iteration for rank, (_, _, iteration, *_) in enumerate(reports) if iteration is not None}
    lacking = {rank: names for rank, (*_, names, _) in enumerate(reports) if names}
    return Survivors(has_trained, live, states, started, chunk_ids, steps, logs, reduced, resized, stored, lacking)


def _started_by_first(local: Mapping[int, StartedSnapshot], world: World) -> dict[int, StartedSnapshot]:
    """Returns, by iteration, the started snapshot of the first worker that knows one."""
    known_by_rank = list(enumerate(gather(sorted(local))))
    first = {iteration: rank for rank, iterations in reversed(known_by_rank) for iteration in iterations}
    contributions = gather({iteration: local[iteration] for iteration, rank in first.items() if rank == world.rank})
    return {iteration: snapshot for contribution in contributions for iteration, snapshot in contribution.items()}


def _logs(engine: Engine, records: Records, progress: ReplayProgress) -> Logs:
    local = engine.world.pipeline_rank, engine.tap.kept(), engine.reduced, progress.interrupted, records.iterations()
    stages, kept, reduced, replayed, recorded = (
        dict(enumerate(by_rank)) for by_rank in zip(*gather(local), strict=True)
    )
    return Logs(
        stages=stages,
        feeds=engine.tap.feeds,
        kept=kept,
        reduced={rank: iteration for rank, iteration in reduced.items() if iteration is not None},
        records=set().union(*recorded.values()),
        replayed={rank: state for rank, state in replayed.items() if state is not None},
    )


def commit_saved_snapshots(survivor_state: Survivors, tiers: Tiers, commit: CommitReported, world: World) -> None:
    """Commits snapshots that every worker, including lost ones, had saved before the loss; a collective call.

    A snapshot is committed once the all-reduce of the next iteration reports that all have copied it.  If that
    all-reduce was interrupted, or the committing worker is lost, the reports of the parts prove the snapshot complete.
    The job then need not use an earlier one.  Parts of another number of workers prove nothing.
    """
    if survivor_state.resized:
        return
    store, ranks = (tiers.storage, range(world.size)) if tiers.memory is None else (tiers.memory, tiers.node)
    commits = world.rank == 0 if tiers.memory is None else tiers.leads_node

    def commit_once(iteration: int, state: dict) -> None:
        if commits and iteration not in store.iterations():
            commit(store, iteration, state, ranks)

    started = {iteration: snapshot.state for iteration, snapshot in survivor_state.begun.items()}
    for iteration, state in sorted({**survivor_state.states, **started}.items()):
        if all(gather(not commits or store.is_publishable(iteration, ranks))):
            run_on_all(partial(commit_once, iteration, state), "cannot publish what all workers had saved")


class Box(NamedTuple):
    """A box of a slot of a tensor that a worker has or needs.

    Attributes:
        name: of the tensor in the unpartitioned model.
        slot: as in :class:`~moc.state.operators.Fragment`.
        region: the box.
        itemsize: bytes of an element.
    """

    name: str
    slot: str
    region: Region
    itemsize: int


class RegionTransfer(NamedTuple):
    """A region sent from box number ``source_box`` of the source to box number ``target_box`` of the target."""

    source: int
    source_box: int
    target: int
    target_box: int
    region: Region


def transfers(
    available: Sequence[Sequence[Box]], needed: Sequence[Sequence[Box]], most: int = MOST
) -> tuple[list[RegionTransfer], list[Box]]:
    """Computes the transfers from the boxes that each rank has and needs.

    A worker uses its own data first. Otherwise, among the workers with the largest part of a region, the worker that
    sends the fewest bytes so far is the source. Overlapping boxes have the same values. A transfer has at most ``most``
    bytes, or one element.

    Returns:
        Transfers that cover each element of the needed boxes once, in an order for :func:`perform`; and the parts of
        needed boxes that no worker has.
    """
    holders: dict[tuple[str, str], list[tuple[int, int, Region]]] = defaultdict(list)
    for rank, boxes in enumerate(available):
        for number, box in enumerate(boxes):
            holders[box.name, box.slot].append((rank, number, box.region))
    given, found, missing = Counter(), [], []
    for target, boxes in enumerate(needed):
        for number, box in enumerate(boxes):
            left = [*box.region.cut(most // box.itemsize)][::-1]
            while left:
                region, offers = left.pop(), []
                for source, source_box, whole in holders[box.name, box.slot]:
                    if (common := region.intersect(whole)) is not None:
                        offers.append((source != target, -common.numel, given[source], source, source_box, common))
                if not offers:
                    missing.append(box._replace(region=region))
                    continue
                away, _, _, source, source_box, common = min(offers, key=lambda offer: offer[:5])
                given[source] += away * common.numel * box.itemsize
                found.append(RegionTransfer(source, source_box, target, number, common))
                left.extend(region.without(common))
    return _in_turns(found), missing


def _in_turns(found: Iterable[RegionTransfer]) -> list[RegionTransfer]:
    """Orders transfers so that those between different workers run at the same time."""
    free, turns = Counter(), defaultdict(list)
    for one in found:
        turn = max(free[one.source], free[one.target])
        free[one.source] = free[one.target] = turn + 1
        turns[turn].append(one)
    return [one for turn in sorted(turns) for one in turns[turn]]


def perform(
    found: Iterable[RegionTransfer],
    available: Sequence[tuple[Region, torch.Tensor]],
    needed: Sequence[tuple[Region, torch.Tensor]],
    device: torch.device,
) -> None:
    """Sends and receives; all workers call it with the same transfers, and with the values of their boxes.

    Each worker finishes one transfer before it starts the next. The first unfinished transfer always has both workers
    ready, so there is no deadlock. Values in host memory (offload) are sent from ``device``, the device of the worker.
    """
    rank = dist.get_rank()
    for one in found:
        if rank == one.source:
            values = _part(*available[one.source_box], one.region).contiguous()
            if rank != one.target:
                dist.send(values.to(device), one.target)
        if rank == one.target:
            into = _part(*needed[one.target_box], one.region)
            if rank != one.source:
                values = torch.empty(one.region.shape, dtype=into.dtype, device=device)
                dist.recv(values, one.source)
            into.copy_(values)


def _part(region: Region, values: torch.Tensor, part: Region) -> torch.Tensor:
    return values.view(region.shape)[part.slices(region.offset)]


def saved_elsewhere(fragment: Fragment) -> bool:
    """Whether an earlier pipeline stage, not this worker's, saves the tensor chunk."""
    return fragment.replica[0] != 0


def give_to_other_stages(
    state: TrainingState, fragments: Iterable[Fragment], takes: bool, device: torch.device
) -> None:
    """Fills the part of this worker's state that other stages save, from their loaded state; a collective call.

    All workers have loaded the tensor chunks that are not :func:`saved_elsewhere`.  With ``takes``, this worker
    receives the others; otherwise it keeps its state.  ``device``: the device of this worker.

    Raises:
        ValueError: no stage saves a tensor chunk.
    """
    loaded = list(fragments)
    tied = set().union(*gather({one.name for one in loaded if takes and saved_elsewhere(one)}))
    if not tied:
        return
    available = [one for one in loaded if one.name in tied and not saved_elsewhere(one)]
    needed = [one for one in loaded if takes and saved_elsewhere(one)]
    boxes = gather((_boxes(available), _boxes(needed)))
    found, missing = transfers([first for first, _ in boxes], [second for _, second in boxes])
    if missing:
        raise ValueError(f"no pipeline stage saves all of {missing[0].slot} of {missing[0].name}")
    filled = [torch.empty_like(one.view) for one in needed]
    perform(
        found,
        [(one.region, one.view) for one in available],
        [(one.region, values) for one, values in zip(needed, filled, strict=True)],
        device,
    )
    for fragment, values in zip(needed, filled, strict=True):
        state.load(fragment, values)


def _boxes(fragments: Iterable[Fragment]) -> list[Box]:
    return [Box(one.name, one.slot, one.region, one.view.itemsize) for one in fragments]


def exchange(copies: Sequence[RankCopy], state: TrainingState, rank: int) -> int:
    """Sends and receives a plan's copies, one operator at a time; returns the bytes that this rank received.

    All ranks call it with the same copies.  Source and target have the same part of the model, on the same devices.
    """
    by_operator, received = fragments_by_operator(state), 0
    for copy in copies:
        if rank not in (copy.source, copy.target):
            continue
        for fragments in _by_device(by_operator[copy.operator]):
            packed = torch.cat([fragment.view.view(torch.uint8) for fragment in fragments])  # one message for all
            group = group_for(packed)
            if rank == copy.source:
                dist.send(packed, copy.target, group=group)
                continue
            dist.recv(packed, copy.source, group=group)
            values = packed.split([fragment.view.nbytes for fragment in fragments])
            for fragment, value in zip(fragments, values, strict=True):
                state.load(fragment, value.clone().view(fragment.view.dtype))  # aligned for its dtype
            received += packed.nbytes
    return received


def _by_device(fragments: Iterable[Fragment]) -> list[list[Fragment]]:
    """Returns the chunks in device memory, and those in host memory, where offload keeps optimizer state."""
    parts: dict[str, list[Fragment]] = defaultdict(list)
    for fragment in fragments:
        parts[fragment.view.device.type].append(fragment)
    return [parts[kind] for kind in sorted(parts)]
