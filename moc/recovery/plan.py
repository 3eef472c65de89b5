"""How a job goes on after workers were lost: a pure function of what is left.

For an exact policy there are three ways to have the state of an iteration, and a plan takes each rank's by one of them:
it *keeps* what it has, if it is a survivor of that iteration; it *copies* what a survivor holds alike, as data-parallel
replicas do; or it *loads* a checkpoint of that very iteration.  The newest iteration that every rank can have is where
the job goes on, so that work is lost only where state is.

Whoever has seen the vote of an iteration has updated its state, and whoever has not still has the one before (see
``megatron/pretraining/engine/step.py``).  So ranks may be one iteration apart: where the newer state can be copied, the
others roll forward to it; where not, the older one is loaded from its checkpoint by those that are ahead.

With upstream logs there is a fourth way: the pipeline stages that have lost something go back to a checkpoint and
*compute again* what came after it, alone, and so arrive where the others have stayed (:mod:`moc.recovery.scope`).
Whoever is one iteration behind then, but has its reduced gradients, completes that iteration: there was a vote.

If yet another worker is lost meanwhile, stages that were computing again *go on* from the iteration that they had come
to, where all of their workers are left and what they need is there: it is the others' loss, not theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moc.recovery.going_on import Course, goes_on
from moc.recovery.scope import Logs, scope
from moc.recovery.sources import MEMORY, AvailableCheckpoint, RecoveryPath, recoveries
from moc.state.operators import Operator


@dataclass(frozen=True)
class JobInventory:
    """What is left.

    Attributes:
        held: the checkpoints that there are.
        live: by rank, the iteration of the state that its worker has; a new worker has none.
        pieces: by rank and operator, a name of what the rank holds of it: ranks with the same name hold the same
            elements of the same tensors.
        logs: of what passed between pipeline stages; None where there are none.
    """

    held: Sequence[AvailableCheckpoint]
    live: Mapping[int, int] = field(default_factory=dict)
    pieces: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    logs: Logs | None = None


@dataclass(frozen=True)
class RankCopy:
    """What one rank gives another.

    Attributes:
        operator: of which both hold the same piece.
        source: rank that has it.
        target: rank that wants it.
    """

    operator: str
    source: int
    target: int


@dataclass(frozen=True)
class RecoveryPlan:
    """How the job goes on.

    Attributes:
        iteration: from here.
        keep: ranks that have this state already.
        copies: what the others get from them; empty where they load.
        way: the checkpoints that the others load; None where they copy, or where all keep or go on.
        courses: by pipeline stage, how its workers arrive here by themselves, of those that do not keep their state;
            empty where what has to be computed again is computed by all.
        complete: ranks that have the state of the iteration before, and its reduced gradients, and complete it.
    """

    iteration: int
    keep: frozenset[int] = frozenset()
    copies: tuple[RankCopy, ...] = ()
    way: RecoveryPath | None = None
    courses: Mapping[int, Course] = field(default_factory=dict)
    complete: frozenset[int] = frozenset()

    @property
    def stages(self) -> frozenset[int]:
        """Pipeline stages that compute again by themselves, or have done so; empty where all compute together."""
        return frozenset(self.courses)

    @property
    def begin(self) -> int:
        """The first iteration of which some worker's state is on its way here."""
        first = [] if self.way is None else [self.way.moments[0].iteration]
        return min([*first, *(course.begin for course in self.courses.values())], default=self.iteration)

    @property
    def again(self) -> range:
        """The iterations that are computed again, counted from 1."""
        return range(self.begin + 1, self.iteration + 1)

    def course(self, stage: int) -> Course | None:
        """How the workers of a stage arrive here that do not keep their state; None if nothing is to be done for it."""
        if self.courses:
            return self.courses.get(stage)
        return None if self.way is None else Course(self.begin, self.way)

    def computing(self, iteration: int) -> frozenset[int]:
        """The stages that compute an iteration again while others serve it; empty where all compute together."""
        return frozenset(stage for stage, course in self.courses.items() if course.begin < iteration)


def plans(
    inventory: JobInventory, operators: Sequence[Operator], exact: bool, only: int | None = None
) -> Iterator[RecoveryPlan]:
    """The ways to go on, the newest iteration first; arguments as those of :func:`moc.recovery.sources.recoveries`.

    With ``exact`` off, live state is not considered: what partial snapshots lack is counted from checkpoints alone.

    Yields:
        Plans in which every rank has all of its state at the plan's iteration.  Memory is preferred to copies from
        other ranks, and these to storage; and these to what some stages would have to compute again.
    """
    ways = {way.iteration: way for way in recoveries(inventory.held, operators, exact, only)}
    live = {rank: at for rank, at in inventory.live.items() if exact and only is None}
    for iteration in sorted({*ways, *live.values()}, reverse=True):
        keep = frozenset(rank for rank, at in live.items() if at == iteration)
        way, copies = ways.get(iteration), _copies(keep, inventory.pieces)
        by_stages = _by_stages(iteration, live, ways.values(), inventory, operators)
        if copies is not None and (way is None or way.base.tier != MEMORY):
            yield RecoveryPlan(iteration, keep, copies)
        elif way is not None and len(way.moments) == 1:
            yield RecoveryPlan(iteration, keep, (), way)
        elif by_stages is not None:
            yield by_stages
        elif way is not None:  # iterations are computed again, by all ranks together
            yield RecoveryPlan(iteration, frozenset(), (), way)


def _by_stages(
    iteration: int,
    live: Mapping[int, int],
    ways: Iterable[RecoveryPath],
    inventory: JobInventory,
    operators: Sequence[Operator],
) -> RecoveryPlan | None:
    """The stages that are not whole compute again what came after a checkpoint, the newest that logs allow."""
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
    """What ranks that do not keep their state get from those that do; None if they do not have all of it."""
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
    """Why there is no plan, in half a sentence that names an operator which the newest checkpoint lacks."""
    if not inventory.held:
        return "there is none"
    newest = max(held.iteration for held in inventory.held)
    there = {name for held in inventory.held if held.iteration == newest for name in held.operators}
    lacking = next((operator.name for operator in operators if operator.name not in there), None)
    if lacking is None:
        return f"that of iteration {newest} lacks some operator's weights or moments"
    return f"that of iteration {newest} lacks {lacking}"
