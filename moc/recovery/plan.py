"""Plans the recovery of a job that has lost workers: a pure function of the surviving state.

A rank reaches the state of an iteration in one of three ways:

* It *keeps* its state, if it survived at that iteration.
* It *copies* the state from a surviving data-parallel replica.
* It *loads* a checkpoint of that iteration.

The job resumes from the newest iteration that every rank can reach, so only lost state costs work. If the policy is not
exact, loaded state may be partly older. If survivors have the complete state, nothing is loaded.

A worker that received the commit all-reduce of an iteration has updated its state; the others have the previous state
(``megatron/pretraining/engine/step.py``). So ranks may be one iteration apart. If the newer state can be copied, the
others roll forward to it. If only lagging ranks have part of the state, they complete the iteration with their reduced
gradients. The commit all-reduce took place, so every rank had them. Otherwise, ranks that are ahead load the older
state from its checkpoint.

Upstream logs add a fourth one (MoEvement, section 3.4, Appendix A): stages of lost workers return to a checkpoint and
*replay* up to the iteration of the others, which logged what they sent. Adjacent stages that replay together recompute
the data between them. As few stages as possible replay. A stage whose replay is interrupted by another loss *continues*
from its progress, if all its workers survive.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from moc.policy import POLICIES, Policy, recovers_exactly
from moc.recovery.sources import (
    LIVE,
    MASTER,
    MEMORY,
    MOMENTS,
    STORAGE,
    AvailableCheckpoint,
    RecoveryPath,
    ReplayPoint,
    recovery_paths,
    window_replay,
)
from moc.state.operators import Detail, Operator
from moc.store.errors import CheckpointError

ChunkIds = Mapping[int, Mapping[str, str]]
"""By rank and operator, an ID of the rank's part: ranks with the same ID have the same elements."""

Lacking = Mapping[int, Collection[str]]
"""By rank with state: the operators whose part on this rank has no state; absent if there are none."""


@dataclass(frozen=True)
class InterruptedReplay:
    """Progress of a worker's interrupted replay.

    Attributes:
        iteration: of its state.
        frozen: operators behind this iteration, since they had not been loaded in full before it.
        reduced: it also has the reduced gradients of the next iteration.
    """

    iteration: int
    frozen: frozenset[str] = frozenset()
    reduced: bool = False


@dataclass(frozen=True)
class Logs:
    """Available upstream logs, and the progress of replays.

    Attributes:
        stages: by rank, its pipeline stage.
        feeds: by stage, the stages that it receives from.
        kept: by rank, the iterations with a complete log, counted from 1.
        reduced: by rank, the iteration whose reduced gradients it has; absent if there is none.
        records: iterations whose step record is known.
        replayed: by rank, the progress of its interrupted replay, if any.
    """

    stages: Mapping[int, int]
    feeds: Mapping[int, Collection[int]]
    kept: Mapping[int, Collection[int]]
    reduced: Mapping[int, int] = field(default_factory=dict)
    records: Collection[int] = frozenset()
    replayed: Mapping[int, InterruptedReplay] = field(default_factory=dict)

    def ranks_of_stage(self, stage: int) -> list[int]:
        """Returns the ranks of a stage."""
        return [rank for rank, rank_stage in self.stages.items() if rank_stage == stage]

    def has_logs(self, stage: int, iterations: Iterable[int]) -> bool:
        """Returns whether a stage has its logs of iterations."""
        required = set(iterations)
        return all(required <= set(self.kept.get(rank, ())) for rank in self.ranks_of_stage(stage))


def replaying_stages(
    lost: Collection[int], since: int, until: int, logs: Logs, ahead: Mapping[int, int] | None = None
) -> dict[int, int] | None:
    """Returns the stages that replay up to the iteration of the others, with the iteration where each starts.

    These are the lost stages, and stages without logs that others need. A stage that is ahead starts from its progress;
    it serves its logs for earlier iterations, like the stages that keep their state.

    Args:
        lost: stages with a worker that lacks its state.
        since: iterations completed at the checkpoint that they return to.
        until: iterations completed by the other stages.
        logs: that are available.
        ahead: by stage, iterations completed in an interrupted replay; after ``since``.

    Returns:
        None if all stages would replay, and none would keep its state.
    """
    starts = dict.fromkeys(lost, since) | dict(ahead or {})

    def serves(feed: int, begin: int) -> bool:
        """Returns whether a stage can serve another's replay from ``begin`` on, until it replays itself."""
        return logs.has_logs(feed, range(begin + 1, starts.get(feed, until) + 1))

    while joins := {feed for stage, begin in starts.items() for feed in logs.feeds[stage] if not serves(feed, begin)}:
        starts |= dict.fromkeys(joins, since)
    return starts if len(starts) < len(logs.feeds) else None


@dataclass(frozen=True)
class StagePlan:
    """How the workers of a stage reach an iteration independently.

    Attributes:
        begin: iterations completed at its start.
        path: recovery path to load; None if the stage already has its full state.
        is_resumed: workers have the state of ``begin``, except for operators still to be loaded.
        behind: ranks one iteration behind ``begin`` that have its reduced gradients: they complete it first.
    """

    begin: int
    path: RecoveryPath | None
    is_resumed: bool = False
    behind: frozenset[int] = frozenset()

    @property
    def complete_at(self) -> int:
        """First iteration that updates all operators of the stage."""
        return self.begin if self.path is None else self.path.iteration

    def point(self, iteration: int) -> ReplayPoint | None:
        """Returns the data to load at this many completed iterations, if any."""
        return None if self.path is None else self.path.point(iteration)


def resumed_stage_plan(
    stage: int,
    until: int,
    live: Mapping[int, int],
    operators_of: Mapping[int, Collection[str]],
    logs: Logs,
    checkpoints: Iterable[AvailableCheckpoint],
    operators: Sequence[Operator],
) -> StagePlan | None:
    """Returns the plan of a stage that continues from its current state to the iteration ``until``.

    A worker completes an iteration only when its stage has all reduced gradients (``moc/session/resume/replay.py``). So
    workers of a stage are at most one iteration apart. The availability of logs is not checked.

    Args:
        stage: number of the stage.
        until: iteration to reach.
        live: by rank, the iteration of its state.
        operators_of: by rank, the operators that it has a part of.
        logs: upstream logs and the progress of replays.
        checkpoints: available checkpoints.
        operators: of the model.

    Returns:
        None if a worker of the stage has no usable state, the workers are too far apart, or state that the stage lacks
        is unavailable.
    """
    ranks = logs.ranks_of_stage(stage)
    states = {rank: state for rank in ranks if (state := _state(rank, live, logs)) is not None}
    begin = max((state.iteration for state in states.values()), default=until)
    newest = {rank for rank, state in states.items() if state.iteration == begin}
    behind = {rank for rank, state in states.items() if state.iteration == begin - 1 and state.reduced}
    if newest | behind != set(ranks) or begin > until:
        return None
    frozen = set().union(*(states[rank].frozen for rank in newest)) & set().union(
        *(operators_of[rank] for rank in ranks)
    )
    lacking = [operator for operator in operators if operator.name in frozen]
    stage_plan = StagePlan(begin, _load_path(lacking, begin, checkpoints), is_resumed=True, behind=frozenset(behind))
    if (lacking and stage_plan.path is None) or stage_plan.complete_at > until:
        return None
    recorded = {*range(stage_plan.complete_at + 1, until + 1), *([begin] if behind else [])}
    return stage_plan if recorded <= set(logs.records) else None


def _state(rank: int, live: Mapping[int, int], logs: Logs) -> InterruptedReplay | None:
    if rank in live:
        return InterruptedReplay(live[rank], reduced=logs.reduced.get(rank) == live[rank] + 1)
    return logs.replayed.get(rank)


def _load_path(
    lacking: Sequence[Operator], begin: int, checkpoints: Iterable[AvailableCheckpoint]
) -> RecoveryPath | None:
    if not lacking:
        return None
    by_iteration: dict[int, list[AvailableCheckpoint]] = defaultdict(list)
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.tier):  # memory before storage
        by_iteration[checkpoint.iteration].append(checkpoint)
    return window_replay(by_iteration, lacking, begin)


def live_states(
    live: Mapping[int, int], chunk_ids: ChunkIds, policy: str, lacking: Lacking = MappingProxyType({})
) -> list[AvailableCheckpoint]:
    """Returns the operators that survivors have completely, by iteration of their state.

    Args:
        live: by rank, the iteration of its state.
        chunk_ids: of all ranks, new workers included.
        policy: name of the policy in force.
        lacking: exceptions from ``live``.
    """
    checkpoints = []
    for iteration in sorted(set(live.values())):
        ranks = [rank for rank, rank_iteration in live.items() if rank_iteration == iteration]
        available = {
            chunk for rank in ranks for chunk in chunk_ids[rank].items() if chunk[0] not in lacking.get(rank, ())
        }
        incomplete = {
            name
            for rank_chunks in chunk_ids.values()
            for name, chunk_id in rank_chunks.items()
            if (name, chunk_id) not in available
        }
        complete = {name: Detail.FULL.value for name, _ in sorted(available) if name not in incomplete}
        if complete:
            checkpoints.append(AvailableCheckpoint(iteration, LIVE, complete, policy))
    return checkpoints


def path_of_survivors(iteration: int, operators: Sequence[Operator]) -> RecoveryPath:
    """Returns the path of a run whose survivors have the complete state of an iteration; it loads nothing."""
    state = AvailableCheckpoint(iteration, LIVE, {operator.name: Detail.FULL.value for operator in operators})
    sources = {(operator.name, part): state for operator in operators for part in (MASTER, MOMENTS)}
    return RecoveryPath((ReplayPoint(iteration, sources),))


def kept_operators(path: RecoveryPath) -> dict[str, int]:
    """Returns the operators that survivors keep on a recovery path, with the iteration of their state."""
    return {name: checkpoint.iteration for (name, _), checkpoint in path.sources.items() if checkpoint.tier == LIVE}


def still_needed(
    path: RecoveryPath, checkpoints: Iterable[AvailableCheckpoint], operators: Sequence[Operator]
) -> list[AvailableCheckpoint]:
    """Returns the checkpoints in use, and the ones that would replace survivor state after another loss."""
    used = {checkpoint.key: checkpoint for checkpoint in path.checkpoints() if checkpoint.tier != LIVE}
    if kept_operators(path):
        past = [checkpoint for checkpoint in checkpoints if checkpoint.iteration <= path.iteration]
        older_path = next(recovery_paths(past, operators, exact=False), None)
        used |= {} if older_path is None else {checkpoint.key: checkpoint for checkpoint in older_path.checkpoints()}
    return list(used.values())


def survivor_copies(
    path: RecoveryPath, live: Mapping[int, int], chunk_ids: ChunkIds, lacking: Lacking = MappingProxyType({})
) -> list[tuple[str, int, int]]:
    """Returns copies of survivor state to ranks that lack it: operator, source and target."""
    kept, sent, copies = kept_operators(path), Counter(), []

    def has(rank: int, name: str) -> bool:
        return live.get(rank) == kept[name] and name not in lacking.get(rank, ())

    for target, rank_chunks in sorted(chunk_ids.items()):
        for name, chunk_id in rank_chunks.items():
            if name in kept and not has(target, name):
                sources = [rank for rank in live if has(rank, name) and chunk_ids[rank].get(name) == chunk_id]
                source = min(sources, key=lambda rank: (sent[rank], rank))
                sent[source] += 1
                copies.append((name, source, target))
    return copies


def complete_ranks(
    path: RecoveryPath, live: Mapping[int, int], chunk_ids: ChunkIds, lacking: Lacking = MappingProxyType({})
) -> frozenset[int]:
    """Returns the ranks that keep all their state at the path's iteration."""
    kept = kept_operators(path)
    candidates = [
        rank
        for rank, rank_iteration in live.items()
        if kept and rank_iteration == path.iteration and not lacking.get(rank)
    ]
    return frozenset(rank for rank in candidates if all(kept.get(name) == path.iteration for name in chunk_ids[rank]))


@dataclass(frozen=True)
class JobInventory:
    """State that survived.

    Attributes:
        checkpoints: available checkpoints.
        live: by rank, the iteration of its worker's state; a new worker has none.
        chunk_ids: by rank and operator, an ID of the rank's part: ranks with the same ID have the same elements of the
            same tensors.
        logs: upstream logs; None without logging.
        reduced: by rank, the iteration whose reduced gradients its worker still has.
        lacking: by rank, the operators whose state its worker lacks, though it has the others.
    """

    checkpoints: Sequence[AvailableCheckpoint]
    live: Mapping[int, int] = field(default_factory=dict)
    chunk_ids: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    logs: Logs | None = None
    reduced: Mapping[int, int] = field(default_factory=dict)
    lacking: Lacking = field(default_factory=dict)


@dataclass(frozen=True)
class RankCopy:
    """Copy of an operator from a source rank to a target rank that holds the same part."""

    operator: str
    source: int
    target: int


@dataclass(frozen=True)
class RecoveryPlan:
    """Instructions for every rank to reach the iteration that the job resumes from.

    Attributes:
        iteration: number of completed iterations after the recovery.
        keep: ranks that keep their state.
        copies: copies of operators from survivors to ranks that do not load them.
        path: recovery path that the others load; None if they copy, or if all keep or continue. For an inexact policy
            it includes the survivor state that its holders keep.
        stage_plans: by pipeline stage, the plan of its workers, for stages that do not keep their state; empty if all
            stages replay together.
        complete: ranks one iteration behind that have the reduced gradients, and complete the iteration.
    """

    iteration: int
    keep: frozenset[int] = frozenset()
    copies: tuple[RankCopy, ...] = ()
    path: RecoveryPath | None = None
    stage_plans: Mapping[int, StagePlan] = field(default_factory=dict)
    complete: frozenset[int] = frozenset()

    @property
    def stages(self) -> frozenset[int]:
        """Pipeline stages that replay, or have replayed, independently; empty if all replay together."""
        return frozenset(self.stage_plans)

    @property
    def reads_storage(self) -> bool:
        """Whether some worker reads a checkpoint in storage."""
        paths = filter(None, [self.path, *(stage_plan.path for stage_plan in self.stage_plans.values())])
        return any(checkpoint.tier == STORAGE for path in paths for checkpoint in path.checkpoints())

    @property
    def begin(self) -> int:
        """Iterations completed where the first worker starts to load or replay."""
        starts = [] if self.path is None else [self.path.points[0].iteration]
        return min([*starts, *(stage_plan.begin for stage_plan in self.stage_plans.values())], default=self.iteration)

    @property
    def replayed_iterations(self) -> range:
        """Replayed iterations, counted from 1."""
        return range(self.begin + 1, self.iteration + 1)

    def stage_plan(self, stage: int) -> StagePlan | None:
        """Returns the plan for a stage's workers that do not keep their state; None if there is nothing to do."""
        if self.stage_plans:
            return self.stage_plans.get(stage)
        return None if self.path is None else StagePlan(self.begin, self.path)

    def computing(self, iteration: int) -> frozenset[int]:
        """Returns the stages that replay an iteration while others serve it; empty if all replay together."""
        return frozenset(stage for stage, stage_plan in self.stage_plans.items() if stage_plan.begin < iteration)


def plans(
    inventory: JobInventory, operators: Sequence[Operator], exact: bool, only: int | None = None
) -> Iterator[RecoveryPlan]:
    """Yields plans, the newest iteration first; arguments as for :func:`moc.recovery.sources.recovery_paths`.

    With ``exact`` off, survivor state of only some operators counts only if it is among the checkpoints
    (:mod:`moc.recovery.plan`).

    Yields:
        Plans that bring every rank to its complete state at the plan's iteration. The order of preference is:
        memory, copies from other ranks, storage and updates by saved gradients, a replay by some stages. With ``exact``
        off, copies to all are preferred, since checkpoints of the same iteration may have older experts.
    """
    paths = {path.iteration: path for path in recovery_paths(inventory.checkpoints, operators, exact, only)}
    live, lacking = inventory.live if only is None else {}, inventory.lacking
    for iteration in sorted({*paths, *live.values()}, reverse=True):
        keep = frozenset(
            rank for rank, rank_iteration in live.items() if rank_iteration == iteration and not lacking.get(rank)
        )
        path, copies = paths.get(iteration), _copies(keep, inventory.chunk_ids)
        by_stages = _by_stages(iteration, live, paths.values(), inventory, operators) if exact else None
        behind = frozenset(
            rank
            for rank, rank_iteration in live.items()
            if rank_iteration + 1 == iteration == inventory.reduced.get(rank) and not lacking.get(rank)
        )
        if copies is not None:
            behind = frozenset()  # copying is enough
        elif behind:  # only they may have some operator
            copies = _copies(keep | behind, inventory.chunk_ids)
        if copies is not None and not exact:
            yield RecoveryPlan(iteration, keep, copies, path_of_survivors(iteration, operators), complete=behind)
        elif copies is not None and (path is None or path.base.tier != MEMORY or path.gradients):
            yield RecoveryPlan(iteration, keep, copies, complete=behind)
        elif path is not None and len(path.points) == 1:
            state = inventory.live, inventory.chunk_ids, lacking
            keep = (keep if exact else frozenset()) | complete_ranks(path, *state)
            copies = tuple(RankCopy(*copy) for copy in survivor_copies(path, *state))
            yield RecoveryPlan(iteration, keep, copies, path)
        elif by_stages is not None:
            yield by_stages
        elif path is not None:  # all ranks replay together
            yield RecoveryPlan(iteration, frozenset(), (), path)


def _by_stages(
    iteration: int,
    live: Mapping[int, int],
    paths: Iterable[RecoveryPath],
    inventory: JobInventory,
    operators: Sequence[Operator],
) -> RecoveryPlan | None:
    """Plans a replay by the incomplete stages, from the newest checkpoint that the logs allow."""
    logs, keep = inventory.logs, {rank for rank, rank_iteration in live.items() if rank_iteration == iteration}
    if logs is None or not keep:
        return None
    behind = {
        rank
        for rank, rank_iteration in live.items()
        if rank_iteration == iteration - 1 and logs.reduced.get(rank) == iteration
    }
    lost = {stage for rank, stage in logs.stages.items() if rank not in keep | behind}
    if not lost:
        return RecoveryPlan(iteration, frozenset(keep), complete=frozenset(behind))
    resumed = {
        stage: resumed_stage_plan(stage, iteration, live, inventory.chunk_ids, logs, inventory.checkpoints, operators)
        for stage in lost
    }
    for path in sorted(paths, key=lambda path: -path.iteration):
        if path.iteration > iteration or not set(range(path.iteration + 1, iteration + 1)) <= set(logs.records):
            continue
        from_start = StagePlan(path.points[0].iteration, path)
        ahead = {
            stage: stage_plan
            for stage, stage_plan in resumed.items()
            if stage_plan is not None and stage_plan.begin > from_start.begin
        }
        starts = replaying_stages(
            lost, from_start.begin, iteration, logs, {stage: stage_plan.begin for stage, stage_plan in ahead.items()}
        )
        if starts is not None:
            stage_plans = {
                stage: from_start if begin == from_start.begin else ahead[stage] for stage, begin in starts.items()
            }
            keeping = {rank for rank, stage in logs.stages.items() if stage not in stage_plans}
            loaded_path = path if from_start in stage_plans.values() else None
            return RecoveryPlan(
                iteration, frozenset(keep & keeping), (), loaded_path, stage_plans, frozenset(behind & keeping)
            )
    return None


def _copies(keep: frozenset[int], chunk_ids: Mapping[int, Mapping[str, str]]) -> tuple[RankCopy, ...] | None:
    """Returns copies from the ranks that keep their state to all others; None if a part has no source."""
    if not keep:
        return None
    copies, sent = [], Counter()
    for target in sorted(set(chunk_ids) - keep):
        for operator, chunk_id in chunk_ids[target].items():
            sources = [rank for rank in sorted(keep) if chunk_ids[rank].get(operator) == chunk_id]
            if not sources:
                return None
            source = min(sources, key=lambda rank: sent[rank])
            sent[source] += 1
            copies.append(RankCopy(operator, source, target))
    return tuple(copies)


def explain_no_plan(inventory: JobInventory, operators: Sequence[Operator]) -> str:
    """Explains in half a sentence why there is no plan, by an operator that the newest checkpoint lacks."""
    if not inventory.checkpoints:
        return "there is none"
    newest = max(checkpoint.iteration for checkpoint in inventory.checkpoints)
    operators_saved = {
        name for checkpoint in inventory.checkpoints if checkpoint.iteration == newest for name in checkpoint.operators
    }
    lacking = next((operator.name for operator in operators if operator.name not in operators_saved), None)
    if lacking is None:
        return f"the snapshot of iteration {newest} lacks some operator's weights or moments"
    return f"the snapshot of iteration {newest} lacks {lacking}"


def exact_resume_error(
    checkpoints: Iterable[AvailableCheckpoint], policy: Policy, iteration: int = -1
) -> CheckpointError | None:
    """Returns the error of an exact policy that cannot resume because newer snapshots are inexact; None if it can.

    ``iteration`` is the one that it would resume from; -1 if there is none.
    """
    newest = (
        next(recovery_paths(checkpoints, policy.operators, exact=False), None) if recovers_exactly(policy) else None
    )
    if newest is None or newest.iteration <= iteration:
        return None
    name = newest.base.policy
    if name not in POLICIES or POLICIES[name].is_exact:
        return None
    return CheckpointError(
        f"--ckpt-policy {policy.name} cannot resume from the snapshot of iteration {newest.iteration}: --ckpt-policy "
        f"{name} took it, with experts older than the rest. Fix: start once more with --ckpt-policy {name}, end the "
        "job with SIGTERM or --exit-interval, which saves everything, and then change the policy",
        code="policy-change-refused",
    )
