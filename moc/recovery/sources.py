"""Chooses the checkpoint that each operator comes from: a pure function of the available checkpoints.

An exact policy resumes from a single iteration.  Either one checkpoint holds all of it, or checkpoints of consecutive
iterations do together: with a replay of the iterations between them (MoEvement, section 3.3), or with updates by the
gradients of these iterations, where checkpoints have them.  With partial experts
checkpointing (MoC-System, section 5.1), the dense part comes from the newest checkpoint that has all of it, and each
expert from wherever its newest state is: the memory of a surviving node, or storage.  Where later checkpoints have the
expert's gradients, updates with these follow (MoEtion, section 5.2), up to the first gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import merge
from itertools import chain, islice

from moc.state.detail import Detail
from moc.state.operators import Operator

MEMORY, STORAGE = "memory", "storage"
BEFORE = "memory before"
"""Memory of an abandoned time line, in which some experts are newer than the rest."""
LIVE = "live"
"""Stands for a tier where the state comes from surviving workers."""
MASTER, MOMENTS, COMPUTE = "master", "moments", "compute"
_GRAD = Detail.GRAD.value
PARTS = {
    Detail.FULL.value: (MASTER, MOMENTS),
    Detail.MASTER.value: (MASTER,),
    Detail.MOMENTS.value: (MOMENTS,),
    Detail.COMPUTE.value: (COMPUTE,),
}
"""By detail, the parts of an operator's state that it holds; with COMPUTE alone an operator can compute, not learn."""


def part_of_slot(slot: str) -> str:
    """Returns the part of a learning operator's state that a slot belongs to."""
    return MASTER if slot in ("master", "param") else MOMENTS


@dataclass(frozen=True)
class AvailableCheckpoint:
    """A readable checkpoint.

    Attributes:
        iteration: iterations completed.
        tier: :data:`MEMORY`, :data:`STORAGE`, or :data:`BEFORE`.
        operators: by name, the detail of each operator that is whole in it.
        policy: name of the policy that planned it.
    """

    iteration: int
    tier: str
    operators: Mapping[str, str]
    policy: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[int, str]:
        """Identifies the checkpoint."""
        return self.iteration, self.tier

    def without(self, damaged: Collection[str] | None) -> AvailableCheckpoint | None:
        """Returns the checkpoint without damaged operators; None if none is left, or the damaged ones are unknown."""
        left = {} if damaged is None else {n: detail for n, detail in self.operators.items() if n not in damaged}
        return replace(self, operators=left) if left and len(left) < len(self.operators) else None

    def has(self, iteration: int, tier: str, operators: Mapping[str, Detail]) -> bool:
        """Whether it is of this iteration and tier, and holds these operators at their planned details."""
        details = {name: detail.value for name, detail in operators.items()}
        return self.key == (iteration, tier) and details.items() <= dict(self.operators).items()


Sources = Mapping[tuple[str, str], AvailableCheckpoint]
"""By operator and part of its state, the checkpoint that it comes from."""


@dataclass(frozen=True)
class ReplayPoint:
    """What is loaded at an iteration of a recovery path, before the next one is replayed or the run resumes.

    Attributes:
        iteration: iterations completed.
        sources: of the loaded operators; those that were whole at an earlier point are not loaded again.
        folds: by operator, the checkpoints with the gradients of the iterations after its source's, ascending: the
            operator is updated with these once it is loaded.
    """

    iteration: int
    sources: Sources
    folds: Mapping[str, Sequence[AvailableCheckpoint]] = field(default_factory=dict)

    @property
    def full(self) -> tuple[str, ...]:
        """Operators that learn from here on."""
        return tuple(name for name, part in self.sources if part == MASTER)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Operators that can compute here, but do not learn yet."""
        return tuple(name for name, part in self.sources if part == COMPUTE)

    def used(self) -> list[AvailableCheckpoint]:
        """Returns the checkpoints in use, the newest first."""
        distinct = {held.key: held for held in chain(self.sources.values(), *self.folds.values())}
        return [distinct[key] for key in sorted(distinct, key=lambda key: (-key[0], key[1]))]


@dataclass(frozen=True)
class RecoveryPath:
    """Checkpoints and replays that lead to a state to resume from.

    At each moment something is loaded; between two of them an iteration is replayed.
    """

    moments: tuple[ReplayPoint, ...]

    @property
    def iteration(self) -> int:
        """Iteration that the run resumes from."""
        return self.moments[-1].iteration

    @cached_property
    def sources(self) -> Sources:
        """Sources of the state that operators learn with."""
        return {key: held for moment in self.moments for key, held in moment.sources.items() if key[1] != COMPUTE}

    @cached_property
    def folds(self) -> Mapping[str, Sequence[AvailableCheckpoint]]:
        """By operator, the checkpoints with the gradients that follow its source."""
        return {name: steps for moment in self.moments for name, steps in moment.folds.items()}

    @property
    def base(self) -> AvailableCheckpoint:
        """Checkpoint that provides the non-tensor state."""
        return self.at(self.iteration)

    def moment(self, iteration: int) -> ReplayPoint | None:
        """Returns the point at this many completed iterations, if any."""
        return next((moment for moment in self.moments if moment.iteration == iteration), None)

    def at(self, iteration: int) -> AvailableCheckpoint:
        """Returns the checkpoint that provides the non-tensor state of a point: of those in use, preferably storage.

        All workers read it.  Memory is readable by all only if no node is lost, and then nothing of this iteration
        comes from storage.
        """
        of_this = [held for held in self.used() if held.iteration == iteration]
        return next((held for held in of_this if held.tier == STORAGE), of_this[0])

    def used(self) -> list[AvailableCheckpoint]:
        """Returns all checkpoints in use, the newest first."""
        return [held for moment in reversed(self.moments) for held in moment.used()]

    @property
    def stale(self) -> list[str]:
        """Operators whose recovered state is of another iteration, older or newer."""
        if len(self.moments) > 1:
            return []  # they learn until the last moment
        of = {name: {steps[-1].iteration} for name, steps in self.folds.items()}
        for (name, _), held in self.sources.items():
            if name not in self.folds:
                of.setdefault(name, set()).add(held.iteration)
        return sorted(name for name, iterations in of.items() if iterations != {self.iteration})

    def learned_until(self, operator: str) -> int:
        """Returns the last iteration whose update is in the operator's recovered state."""
        if len(self.moments) > 1:
            return self.iteration
        folds = self.folds.get(operator)
        last = folds[-1] if folds else self.sources[operator, MASTER]
        return min(last.iteration, self.iteration)  # newer updates do not count


def recoveries(
    held: Iterable[AvailableCheckpoint], operators: Sequence[Operator], exact: bool, only: int | None = None
) -> Iterator[RecoveryPath]:
    """Yields recovery paths, the newest iteration first.

    Args:
        held: available checkpoints.
        operators: of the model.
        exact: all state must be of one iteration, saved or replayed; otherwise experts may be older or newer than the
            rest, and windows left by an exact policy are paths, too.
        only: resume from this iteration, and use nothing newer.

    Yields:
        A path for each iteration at which everything is held, can be replayed, or is reached by saved gradients; with
        ``exact`` off, at which the dense part is, and each expert somewhere.  Memory is preferred to storage.
    """
    usable = [one for one in held if only is None or one.iteration <= only]
    newest_first = sorted(usable, key=lambda one: (-one.iteration, one.tier))
    there: dict[int, list[AvailableCheckpoint]] = defaultdict(list)
    for one in newest_first:
        there[one.iteration].append(one)
    found = windows(there, operators)
    if exact:
        found = _newest_first(found, _chained(there, newest_first, operators))
    else:
        found = _newest_first(_with_older_experts(there, newest_first, operators), found)
    yield from (way for way in found if only in (None, way.iteration))


def _newest_first(preferred: Iterator[RecoveryPath], others: Iterator[RecoveryPath]) -> Iterator[RecoveryPath]:
    last = None
    for way in merge(preferred, others, key=lambda way: -way.iteration):
        if way.iteration != last:
            last = way.iteration
            yield way


def windows(
    there: Mapping[int, Sequence[AvailableCheckpoint]], operators: Sequence[Operator]
) -> Iterator[RecoveryPath]:
    """Yields the windows from whose end a run can resume exactly, the newest first (MoEvement, section 3.3).

    ``there`` has by iteration, the newest first, its checkpoints, the preferred ones first.
    """
    last = None
    for start in there:
        way = window_replay(there, operators, start)
        if way is not None and way.iteration != last:  # otherwise it only replays more
            last = way.iteration
            yield way


def window_replay(
    there: Mapping[int, Sequence[AvailableCheckpoint]], operators: Sequence[Operator], start: int
) -> RecoveryPath | None:
    """Returns the window that starts at an iteration, each operator loaded where it is first whole (Figure 8).

    Before that, every checkpoint of the window must hold its compute weights; after that, it learns by itself.  A full
    checkpoint is a window of one iteration.  Returns None if there is no such window.
    """
    waiting, moments = [operator.name for operator in operators], []
    while waiting:
        iteration, sources, later = start + len(moments), {}, []
        for name in waiting:
            whole = {(name, part): _first(there.get(iteration, ()), name, part) for part in (MASTER, MOMENTS)}
            if None in whole.values():
                whole = {(name, COMPUTE): _first(there.get(iteration, ()), name, COMPUTE)}
                later.append(name)
            if None in whole.values():
                return None
            sources |= whole
        moments.append(ReplayPoint(iteration, sources))
        waiting = later
    return RecoveryPath(tuple(moments))


def _with_older_experts(
    there: Mapping[int, Sequence[AvailableCheckpoint]],
    newest_first: Sequence[AvailableCheckpoint],
    operators: Sequence[Operator],
) -> Iterator[RecoveryPath]:
    has_gradients = {name for one in newest_first for name, detail in one.operators.items() if detail == _GRAD}
    for iteration, of_this in there.items():
        sources, folds = {}, {}
        for operator in operators:
            name, held = operator.name, of_this if operator.expert is None else newest_first
            found = {(name, part): _first(held, name, part) for part in (MASTER, MOMENTS)}
            if name in has_gradients:
                past = [one for one in newest_first if one.iteration <= iteration]
                base, steps = _chain(there, past, name, iteration)
                is_live = any(one is not None and one.key == (iteration, LIVE) for one in found.values())
                reaches = steps and steps[-1].iteration == iteration and not is_live
                if reaches or steps and all(one is base for one in found.values()):
                    found, folds[name] = dict.fromkeys(found, base), steps
            sources |= found
        if None not in sources.values():
            yield RecoveryPath((ReplayPoint(iteration, sources, folds),))


def _chained(
    there: Mapping[int, Sequence[AvailableCheckpoint]],
    newest_first: Sequence[AvailableCheckpoint],
    operators: Sequence[Operator],
) -> Iterator[RecoveryPath]:
    """Yields a path for each iteration that the chains of all operators reach."""
    if not any(_GRAD in one.operators.values() for one in newest_first):
        return
    for iteration in there:
        past, sources, folds = [one for one in newest_first if one.iteration <= iteration], {}, {}
        for name in (operator.name for operator in operators):
            base, steps = _chain(there, past, name, iteration)
            if base is None or base.iteration + len(steps) < iteration:
                break
            sources |= {(name, part): base for part in (MASTER, MOMENTS)}
            folds |= {name: steps} if steps else {}
        else:
            yield RecoveryPath((ReplayPoint(iteration, sources, folds),))


def _chain(
    there: Mapping[int, Sequence[AvailableCheckpoint]],
    newest_first: Iterable[AvailableCheckpoint],
    operator: str,
    until: int,
) -> tuple[AvailableCheckpoint | None, list[AvailableCheckpoint]]:
    """Returns the newest checkpoint with all of an operator, and those with its next gradients, without a gap.

    An abandoned time line has no part in it: its gradients led to another state.  Neither has live state, which has no
    records of its updates.
    """
    whole = (one for one in newest_first if one.operators.get(operator) == Detail.FULL.value)
    base = next((one for one in whole if one.tier != LIVE), None)
    steps: list[AvailableCheckpoint] = []
    if base is None or base.tier == BEFORE:
        return base, steps
    for iteration in range(base.iteration + 1, until + 1):
        having = (one for one in there.get(iteration, ()) if one.operators.get(operator) == _GRAD)
        one = next((one for one in having if one.tier != BEFORE), None)
        if one is None:
            break
        steps.append(one)
    return base, steps


def _first(held: Iterable[AvailableCheckpoint], operator: str, part: str) -> AvailableCheckpoint | None:
    return next((one for one in held if part in PARTS.get(one.operators.get(operator, ""), ())), None)


def needed(
    held: Iterable[AvailableCheckpoint], operators: Sequence[Operator], exact: bool, keep: int
) -> set[tuple[int, str]]:
    """Returns the keys of the checkpoints that are still of use.

    These are those of the newest ``keep`` recovery paths, and all newer ones, which may start an incomplete window; all
    checkpoints, if there is no path.
    """
    held = list(held)
    ways = list(islice(recoveries(held, operators, exact), keep))
    newest = max((way.iteration for way in ways), default=-1)
    return {one.key for way in ways for one in way.used()} | {one.key for one in held if one.iteration > newest}
