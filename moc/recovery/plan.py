"""Plans the recovery of a job that has lost workers: a pure function of the surviving state.

A rank reaches the state of an iteration in one of these ways:

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

Upstream logs add another way (MoEvement, section 3.4, Appendix A): stages of lost workers return to a checkpoint and
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
    recoveries,
    window_replay,
)
from moc.state.operators import Detail, Operator
from moc.store.errors import CheckpointError

Pieces = Mapping[int, Mapping[str, str]]
"""By rank and operator, an ID of the rank's part: ranks with the same ID have the same elements."""

Lacking = Mapping[int, Collection[str]]
"""By rank with state, the operators among its pieces whose state it lacks; absent if it has all."""


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

    def of(self, stage: int) -> list[int]:
        """Returns the ranks of a stage."""
        return [rank for rank, other in self.stages.items() if other == stage]

    def have(self, stage: int, iterations: Iterable[int]) -> bool:
        """Returns whether a stage has its logs of iterations."""
        wanted = set(iterations)
        return all(wanted <= set(self.kept.get(rank, ())) for rank in self.of(stage))


def scope(
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
    begins = dict.fromkeys(lost, since) | dict(ahead or {})

    def serves(feed: int, begin: int) -> bool:
        """Returns whether a stage can serve another's replay from ``begin`` on, until it replays itself."""
        return logs.have(feed, range(begin + 1, begins.get(feed, until) + 1))

    while joins := {feed for stage, begin in begins.items() for feed in logs.feeds[stage] if not serves(feed, begin)}:
        begins |= dict.fromkeys(joins, since)
    return begins if len(begins) < len(logs.feeds) else None


@dataclass(frozen=True)
class Course:
    """Stage plan: how the workers of a stage reach an iteration independently.

    Attributes:
        begin: iterations completed at its start.
        way: recovery path to load; None if the stage already has its full state.
        goes_on: workers have the state of ``begin``, except for operators still to be loaded.
        behind: ranks one iteration behind ``begin`` that have its reduced gradients: they complete it first.
    """

    begin: int
    way: RecoveryPath | None
    goes_on: bool = False
    behind: frozenset[int] = frozenset()

    @property
    def whole(self) -> int:
        """First iteration that updates all operators of the stage."""
        return self.begin if self.way is None else self.way.iteration

    def moment(self, iteration: int) -> ReplayPoint | None:
        """Returns the data to load at this many completed iterations, if any."""
        return None if self.way is None else self.way.moment(iteration)


def goes_on(
    stage: int,
    until: int,
    live: Mapping[int, int],
    pieces: Mapping[int, Collection[str]],
    logs: Logs,
    held: Iterable[AvailableCheckpoint],
    operators: Sequence[Operator],
) -> Course | None:
    """Returns the plan of a stage that continues from its current state to the iteration ``until``.

    A worker completes an iteration only when its stage has all reduced gradients (``moc/session/resume/replay.py``). So
    workers of a stage are at most one iteration apart. The availability of logs is not checked.

    Args:
        stage: number of the stage.
        until: iteration to reach.
        live: by rank, the iteration of its state.
        pieces: by rank, the operators that it has a part of.
        logs: upstream logs and the progress of replays.
        held: available checkpoints.
        operators: of the model.

    Returns:
        None if a worker of the stage has no usable state, the workers are too far apart, or state that the stage lacks
        is unavailable.
    """
    ranks = logs.of(stage)
    states = {rank: state for rank in ranks if (state := _state(rank, live, logs)) is not None}
    begin = max((state.iteration for state in states.values()), default=until)
    arrived = {rank for rank, state in states.items() if state.iteration == begin}
    behind = {rank for rank, state in states.items() if state.iteration == begin - 1 and state.reduced}
    if arrived | behind != set(ranks) or begin > until:
        return None
    frozen = set().union(*(states[rank].frozen for rank in arrived)) & set().union(*(pieces[rank] for rank in ranks))
    lacking = [operator for operator in operators if operator.name in frozen]
    course = Course(begin, _way(lacking, begin, held), goes_on=True, behind=frozenset(behind))
    if (lacking and course.way is None) or course.whole > until:
        return None
    recorded = {*range(course.whole + 1, until + 1), *([begin] if behind else [])}
    return course if recorded <= set(logs.records) else None


def _state(rank: int, live: Mapping[int, int], logs: Logs) -> InterruptedReplay | None:
    if rank in live:
        return InterruptedReplay(live[rank], reduced=logs.reduced.get(rank) == live[rank] + 1)
    return logs.replayed.get(rank)


def _way(lacking: Sequence[Operator], begin: int, held: Iterable[AvailableCheckpoint]) -> RecoveryPath | None:
    if not lacking:
        return None
    there: dict[int, list[AvailableCheckpoint]] = defaultdict(list)
    for one in sorted(held, key=lambda one: one.tier):  # memory before storage
        there[one.iteration].append(one)
    return window_replay(there, lacking, begin)


def live_states(
    live: Mapping[int, int], pieces: Pieces, policy: str, lacking: Lacking = MappingProxyType({})
) -> list[AvailableCheckpoint]:
    """Returns the operators that survivors have completely, by iteration of their state.

    Args:
        live: by rank, the iteration of its state.
        pieces: of all ranks, new workers included.
        policy: name of the policy in force.
        lacking: exceptions from ``live``.
    """
    found = []
    for iteration in sorted(set(live.values())):
        there = [rank for rank, at in live.items() if at == iteration]
        held = {one for rank in there for one in pieces[rank].items() if one[0] not in lacking.get(rank, ())}
        torn = {name for of_rank in pieces.values() for name, piece in of_rank.items() if (name, piece) not in held}
        whole = {name: Detail.FULL.value for name, _ in sorted(held) if name not in torn}
        if whole:
            found.append(AvailableCheckpoint(iteration, LIVE, whole, policy))
    return found


def path_of_survivors(iteration: int, operators: Sequence[Operator]) -> RecoveryPath:
    """Returns the path of a run whose survivors have the complete state of an iteration; it loads nothing."""
    state = AvailableCheckpoint(iteration, LIVE, {one.name: Detail.FULL.value for one in operators})
    sources = {(one.name, part): state for one in operators for part in (MASTER, MOMENTS)}
    return RecoveryPath((ReplayPoint(iteration, sources),))


def kept_of(way: RecoveryPath) -> dict[str, int]:
    """Returns the operators that survivors keep on a recovery path, with the iteration of their state."""
    return {name: held.iteration for (name, _), held in way.sources.items() if held.tier == LIVE}


def still_needed(
    way: RecoveryPath, held: Iterable[AvailableCheckpoint], operators: Sequence[Operator]
) -> list[AvailableCheckpoint]:
    """Returns the checkpoints in use, and the ones that would replace survivor state after another loss."""
    used = {one.key: one for one in way.used() if one.tier != LIVE}
    if kept_of(way):
        past = [one for one in held if one.iteration <= way.iteration]
        behind = next(recoveries(past, operators, exact=False), None)
        used |= {} if behind is None else {one.key: one for one in behind.used()}
    return list(used.values())


def given(
    way: RecoveryPath, live: Mapping[int, int], pieces: Pieces, lacking: Lacking = MappingProxyType({})
) -> list[tuple[str, int, int]]:
    """Returns copies of survivor state to ranks that lack it: operator, source and target."""
    kept, busy, found = kept_of(way), Counter(), []

    def has(rank: int, name: str) -> bool:
        return live.get(rank) == kept[name] and name not in lacking.get(rank, ())

    for target, of_rank in sorted(pieces.items()):
        for name, piece in of_rank.items():
            if name in kept and not has(target, name):
                holders = [rank for rank in live if has(rank, name) and pieces[rank].get(name) == piece]
                source = min(holders, key=lambda rank: (busy[rank], rank))
                busy[source] += 1
                found.append((name, source, target))
    return found


def whole_ranks(
    way: RecoveryPath, live: Mapping[int, int], pieces: Pieces, lacking: Lacking = MappingProxyType({})
) -> frozenset[int]:
    """Returns the ranks that keep all their state at the path's iteration."""
    kept = kept_of(way)
    there = [rank for rank, at in live.items() if kept and at == way.iteration and not lacking.get(rank)]
    return frozenset(rank for rank in there if all(kept.get(name) == way.iteration for name in pieces[rank]))


@dataclass(frozen=True)
class JobInventory:
    """State that survived.

    Attributes:
        held: available checkpoints.
        live: by rank, the iteration of its worker's state; a new worker has none.
        pieces: by rank and operator, an ID of the rank's part: ranks with the same ID have the same elements of the
            same tensors.
        logs: upstream logs; None without logging.
        reduced: by rank, the iteration whose reduced gradients its worker still has.
        lacking: by rank, the operators among its pieces whose state its worker lacks, though it has the others.
    """

    held: Sequence[AvailableCheckpoint]
    live: Mapping[int, int] = field(default_factory=dict)
    pieces: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
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
        way: recovery path that the others load; None if they copy, or if all keep or continue. For an inexact policy it
            includes the survivor state that its holders keep.
        courses: by pipeline stage, the stage plan of its workers, for stages that do not keep their state; empty if all
            stages replay together.
        complete: ranks one iteration behind that have the reduced gradients, and complete the iteration.
    """

    iteration: int
    keep: frozenset[int] = frozenset()
    copies: tuple[RankCopy, ...] = ()
    way: RecoveryPath | None = None
    courses: Mapping[int, Course] = field(default_factory=dict)
    complete: frozenset[int] = frozenset()

    @property
    def stages(self) -> frozenset[int]:
        """Pipeline stages that replay, or have replayed, independently; empty if all replay together."""
        return frozenset(self.courses)

    @property
    def reads_storage(self) -> bool:
        """Whether some worker reads a checkpoint in storage."""
        ways = filter(None, [self.way, *(course.way for course in self.courses.values())])
        return any(one.tier == STORAGE for way in ways for one in way.used())

    @property
    def begin(self) -> int:
        """Iterations completed where the first worker starts to load or replay."""
        first = [] if self.way is None else [self.way.moments[0].iteration]
        return min([*first, *(course.begin for course in self.courses.values())], default=self.iteration)

    @property
    def again(self) -> range:
        """Replayed iterations, counted from 1."""
        return range(self.begin + 1, self.iteration + 1)

    def course(self, stage: int) -> Course | None:
        """Returns the plan for a stage's workers that do not keep their state; None if there is nothing to do."""
        if self.courses:
            return self.courses.get(stage)
        return None if self.way is None else Course(self.begin, self.way)

    def computing(self, iteration: int) -> frozenset[int]:
        """Returns the stages that replay an iteration while others serve it; empty if all replay together."""
        return frozenset(stage for stage, course in self.courses.items() if course.begin < iteration)


def plans(
    inventory: JobInventory, operators: Sequence[Operator], exact: bool, only: int | None = None
) -> Iterator[RecoveryPlan]:
    """Yields plans, the newest iteration first; arguments as for :func:`moc.recovery.sources.recoveries`.

    With ``exact`` off, survivor state of only some operators counts only if it is among the checkpoints
    (:mod:`moc.recovery.plan`).

    Yields:
        Plans that bring every rank to its complete state at the plan's iteration. The order of preference is:
        memory, copies from other ranks, storage and updates by saved gradients, a replay by some stages. With ``exact``
        off, copies to all are preferred, since checkpoints of the same iteration may have older experts.
    """
    ways = {way.iteration: way for way in recoveries(inventory.held, operators, exact, only)}
    live, lacking = inventory.live if only is None else {}, inventory.lacking
    for iteration in sorted({*ways, *live.values()}, reverse=True):
        keep = frozenset(rank for rank, at in live.items() if at == iteration and not lacking.get(rank))
        way, copies = ways.get(iteration), _copies(keep, inventory.pieces)
        by_stages = _by_stages(iteration, live, ways.values(), inventory, operators) if exact else None
        behind = frozenset(
            r for r, at in live.items() if at + 1 == iteration == inventory.reduced.get(r) and not lacking.get(r)
        )
        if copies is not None:
            behind = frozenset()  # copying is enough
        elif behind:  # only they may have some operator
            copies = _copies(keep | behind, inventory.pieces)
        if copies is not None and not exact:
            yield RecoveryPlan(iteration, keep, copies, path_of_survivors(iteration, operators), complete=behind)
        elif copies is not None and (way is None or way.base.tier != MEMORY or way.folds):
            yield RecoveryPlan(iteration, keep, copies, complete=behind)
        elif way is not None and len(way.moments) == 1:
            state = inventory.live, inventory.pieces, lacking
            keep = (keep if exact else frozenset()) | whole_ranks(way, *state)
            copies = tuple(RankCopy(*one) for one in given(way, *state))
            yield RecoveryPlan(iteration, keep, copies, way)
        elif by_stages is not None:
            yield by_stages
        elif way is not None:  # all ranks replay together
            yield RecoveryPlan(iteration, frozenset(), (), way)


def _by_stages(
    iteration: int,
    live: Mapping[int, int],
    ways: Iterable[RecoveryPath],
    inventory: JobInventory,
    operators: Sequence[Operator],
) -> RecoveryPlan | None:
    """Plans a replay by the incomplete stages, from the newest checkpoint that the logs allow."""
    logs, keep = inventory.logs, {rank for rank, at in live.items() if at == iteration}
    if logs is None or not keep:
        return None
    behind = {rank for rank, at in live.items() if at == iteration - 1 and logs.reduced.get(rank) == iteration}
    lost = {stage for rank, stage in logs.stages.items() if rank not in keep | behind}
    if not lost:
        return RecoveryPlan(iteration, frozenset(keep), complete=frozenset(behind))
    left = {stage: goes_on(stage, iteration, live, inventory.pieces, logs, inventory.held, operators) for stage in lost}
    for way in sorted(ways, key=lambda way: -way.iteration):
        if way.iteration > iteration or not set(range(way.iteration + 1, iteration + 1)) <= set(logs.records):
            continue
        afresh = Course(way.moments[0].iteration, way)
        ahead = {stage: course for stage, course in left.items() if course is not None and course.begin > afresh.begin}
        begins = scope(lost, afresh.begin, iteration, logs, {stage: course.begin for stage, course in ahead.items()})
        if begins is not None:
            courses = {stage: afresh if begin == afresh.begin else ahead[stage] for stage, begin in begins.items()}
            stay = {rank for rank, stage in logs.stages.items() if stage not in courses}
            needed = way if afresh in courses.values() else None
            return RecoveryPlan(iteration, frozenset(keep & stay), (), needed, courses, frozenset(behind & stay))
    return None


def _copies(keep: frozenset[int], pieces: Mapping[int, Mapping[str, str]]) -> tuple[RankCopy, ...] | None:
    """Returns copies from the ranks that keep their state to all others; None if a part has no source."""
    if not keep:
        return None
    copies, given = [], Counter()
    for target in sorted(set(pieces) - keep):
        for operator, piece in pieces[target].items():
            holders = [rank for rank in sorted(keep) if pieces[rank].get(operator) == piece]
            if not holders:
                return None
            source = min(holders, key=lambda rank: given[rank])
            given[source] += 1
            copies.append(RankCopy(operator, source, target))
    return tuple(copies)


def reason(inventory: JobInventory, operators: Sequence[Operator]) -> str:
    """Explains in half a sentence why there is no plan, by an operator that the newest checkpoint lacks."""
    if not inventory.held:
        return "there is none"
    newest = max(held.iteration for held in inventory.held)
    there = {name for held in inventory.held if held.iteration == newest for name in held.operators}
    lacking = next((operator.name for operator in operators if operator.name not in there), None)
    if lacking is None:
        return f"the snapshot of iteration {newest} lacks some operator's weights or moments"
    return f"the snapshot of iteration {newest} lacks {lacking}"


def exact_resume_error(
    held: Iterable[AvailableCheckpoint], policy: Policy, iteration: int = -1
) -> CheckpointError | None:
    """Returns the error of an exact policy that cannot resume because newer snapshots are inexact; None if it can.

    ``iteration`` is the one that it would resume from; -1 if there is none.
    """
    newest = next(recoveries(held, policy.operators, exact=False), None) if recovers_exactly(policy) else None
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
