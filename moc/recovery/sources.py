"""Chooses the checkpoint that provides each operator: a pure function of the available checkpoints.

An exact policy resumes from a single iteration. Either one checkpoint contains all of it, or checkpoints of consecutive
iterations do together. The iterations between these are replayed (MoEvement, section 3.3), or saved gradients of these
iterations are applied.

With partial experts checkpointing (MoC-System, section 5.1), the newest checkpoint with the full dense part provides
it. Each expert is from its newest state, in a surviving node's memory or in storage. If later checkpoints have the
expert's gradients, these are applied (MoEtion, section 5.2), up to the first gap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import merge
from itertools import chain, islice

from moc.state.operators import Detail, Operator

MEMORY, STORAGE = "memory", "storage"
BEFORE = "memory before"
"""Superseded memory; some of its experts are newer than the rest."""
LIVE = "live"
"""Replaces the tier of state that surviving workers keep."""
MASTER, MOMENTS, COMPUTE = "master", "moments", "compute"
_GRAD = Detail.GRAD.value
PARTS = {
    Detail.FULL.value: (MASTER, MOMENTS),
    Detail.MASTER.value: (MASTER,),
    Detail.MOMENTS.value: (MOMENTS,),
    Detail.COMPUTE.value: (COMPUTE,),
}
"""Parts of an operator's state at each detail; with only COMPUTE, an operator can compute but not learn."""


def part_of_slot(slot: str) -> str:
    """Returns the part of a learning operator's state that a slot belongs to."""
    return MASTER if slot in ("master", "param") else MOMENTS


@dataclass(frozen=True)
class AvailableCheckpoint:
    """A readable checkpoint.

    Attributes:
        iteration: iterations completed.
        tier: :data:`MEMORY`, :data:`STORAGE`, :data:`BEFORE` or :data:`LIVE`.
        operators: by name, the detail of each operator that is complete in it.
        policy: name of the policy that planned it.
    """

    iteration: int
    tier: str
    operators: Mapping[str, str]
    policy: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[int, str]:
        """Identity of the checkpoint."""
        return self.iteration, self.tier

    def without(self, damaged: Collection[str] | None) -> AvailableCheckpoint | None:
        """Returns the checkpoint without damaged operators; None if none is left, or the damaged ones are unknown."""
        left = {} if damaged is None else {n: detail for n, detail in self.operators.items() if n not in damaged}
        return replace(self, operators=left) if left and len(left) < len(self.operators) else None

    def has(self, iteration: int, tier: str, operators: Mapping[str, Detail]) -> bool:
        """Returns whether it is of this iteration and tier, and has these operators at their planned details."""
        details = {name: detail.value for name, detail in operators.items()}
        return self.key == (iteration, tier) and details.items() <= dict(self.operators).items()


Sources = Mapping[tuple[str, str], AvailableCheckpoint]
"""Checkpoint by operator and part of its state."""


@dataclass(frozen=True)
class ReplayPoint:
    """State loaded at an iteration of a recovery path, before the next one is replayed or the run resumes.

    Attributes:
        iteration: iterations completed.
        sources: of the loaded operators; operators that were complete at an earlier point are not loaded again.
        folds: by operator, the checkpoints with the gradients of the iterations after its source's, ascending; they are
            applied once the operator is loaded.
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

    State is loaded at each step; between two steps an iteration is replayed.
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
        """Checkpoints with the gradients after its source, by operator."""
        return {name: steps for moment in self.moments for name, steps in moment.folds.items()}

    @property
    def base(self) -> AvailableCheckpoint:
        """Checkpoint that provides the non-tensor state."""
        return self.at(self.iteration)

    def moment(self, iteration: int) -> ReplayPoint | None:
        """Returns the point at this many completed iterations, if any."""
        return next((moment for moment in self.moments if moment.iteration == iteration), None)

    def at(self, iteration: int) -> AvailableCheckpoint:
        """Returns the checkpoint in use that provides the non-tensor state of a point, preferably from storage.

        All workers read it. They can all read memory only if no node is lost, and then nothing of this iteration is
        from storage.
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
            return []  # all learn until the last step of the path
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
        exact: all state must be of one iteration, saved or replayed. Otherwise experts may be older or newer than the
            rest, and windows left by an exact policy are paths, too.
        only: resume from this iteration, and use nothing newer.

    Yields:
        A path for each iteration whose state is complete, can be replayed, or is reached by saved gradients. With
        ``exact`` off, a path requires only a complete dense part, and each expert in any checkpoint. Memory is
        preferred to storage.
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
    """Yields the windows that allow an exact resume from their end, the newest first (MoEvement, section 3.3).

    ``there`` has by iteration, the newest first, its checkpoints, the preferred ones first.
    """
    last = None
    for start in there:
        way = window_replay(there, operators, start)
        if way is not None and way.iteration != last:  # otherwise it only repeats more iterations
            last = way.iteration
            yield way


def window_replay(
    there: Mapping[int, Sequence[AvailableCheckpoint]], operators: Sequence[Operator], start: int
) -> RecoveryPath | None:
    """Returns the window that starts at an iteration, or None if it is incomplete (Figure 8).

    Each operator is loaded at the first iteration where it is complete, and learns from there on. Until then, every
    checkpoint of the window must have its compute weights. A full checkpoint is a window of one iteration.
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
    """Returns the newest checkpoint with all of an operator, and the checkpoints with its next gradients, up to a gap.

    Gradients in superseded memory, or after a base there, are not used: they led to another state. Survivor state is
    not a base, since it has no records of its updates.
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
    """Returns the keys of the checkpoints that are still needed.

    These are the checkpoints of the newest ``keep`` recovery paths and all newer ones, which may start an incomplete
    window. Without a path, all checkpoints are needed.
    """
    held = list(held)
    ways = list(islice(recoveries(held, operators, exact), keep))
    newest = max((way.iteration for way in ways), default=-1)
    return {one.key for way in ways for one in way.used()} | {one.key for one in held if one.iteration > newest}
