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
        remaining = {} if damaged is None else {n: detail for n, detail in self.operators.items() if n not in damaged}
        return replace(self, operators=remaining) if remaining and len(remaining) < len(self.operators) else None

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
        gradients: by operator, the checkpoints with the gradients of the iterations after its source's, ascending; they
            are applied once the operator is loaded.
    """

    iteration: int
    sources: Sources
    gradients: Mapping[str, Sequence[AvailableCheckpoint]] = field(default_factory=dict)

    @property
    def full(self) -> tuple[str, ...]:
        """Operators that learn from here on."""
        return tuple(name for name, part in self.sources if part == MASTER)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Operators that can compute here, but do not learn yet."""
        return tuple(name for name, part in self.sources if part == COMPUTE)

    def checkpoints(self) -> list[AvailableCheckpoint]:
        """Returns the checkpoints in use, the newest first."""
        distinct = {checkpoint.key: checkpoint for checkpoint in chain(self.sources.values(), *self.gradients.values())}
        return [distinct[key] for key in sorted(distinct, key=lambda key: (-key[0], key[1]))]


@dataclass(frozen=True)
class RecoveryPath:
    """Checkpoints and replays that lead to a state to resume from.

    State is loaded at each step; between two steps an iteration is replayed.
    """

    points: tuple[ReplayPoint, ...]

    @property
    def iteration(self) -> int:
        """Iteration that the run resumes from."""
        return self.points[-1].iteration

    @cached_property
    def sources(self) -> Sources:
        """Sources of the state that operators learn with."""
        return {
            key: checkpoint for point in self.points for key, checkpoint in point.sources.items() if key[1] != COMPUTE
        }

    @cached_property
    def gradients(self) -> Mapping[str, Sequence[AvailableCheckpoint]]:
        """Checkpoints with the gradients after its source, by operator."""
        return {name: steps for point in self.points for name, steps in point.gradients.items()}

    @property
    def base(self) -> AvailableCheckpoint:
        """Checkpoint that provides the non-tensor state."""
        return self.checkpoint_at(self.iteration)

    def point(self, iteration: int) -> ReplayPoint | None:
        """Returns the point at this many completed iterations, if any."""
        return next((point for point in self.points if point.iteration == iteration), None)

    def checkpoint_at(self, iteration: int) -> AvailableCheckpoint:
        """Returns the checkpoint in use that provides the non-tensor state of a point, preferably from storage.

        All workers read it. They can all read memory only if no node is lost, and then nothing of this iteration is
        from storage.
        """
        candidates = [checkpoint for checkpoint in self.checkpoints() if checkpoint.iteration == iteration]
        return next((checkpoint for checkpoint in candidates if checkpoint.tier == STORAGE), candidates[0])

    def checkpoints(self) -> list[AvailableCheckpoint]:
        """Returns all checkpoints in use, the newest first."""
        return [checkpoint for point in reversed(self.points) for checkpoint in point.checkpoints()]

    @property
    def stale(self) -> list[str]:
        """Operators whose recovered state is of another iteration, older or newer."""
        if len(self.points) > 1:
            return []  # all learn until the last step of the path
        iterations_of = {name: {steps[-1].iteration} for name, steps in self.gradients.items()}
        for (name, _), checkpoint in self.sources.items():
            if name not in self.gradients:
                iterations_of.setdefault(name, set()).add(checkpoint.iteration)
        return sorted(name for name, iterations in iterations_of.items() if iterations != {self.iteration})

    def learned_until(self, operator: str) -> int:
        """Returns the last iteration whose update is in the operator's recovered state."""
        if len(self.points) > 1:
            return self.iteration
        gradients = self.gradients.get(operator)
        last = gradients[-1] if gradients else self.sources[operator, MASTER]
        return min(last.iteration, self.iteration)  # newer updates do not count


def recovery_paths(
    checkpoints: Iterable[AvailableCheckpoint], operators: Sequence[Operator], exact: bool, only: int | None = None
) -> Iterator[RecoveryPath]:
    """Yields recovery paths, the newest iteration first.

    Args:
        checkpoints: available checkpoints.
        operators: of the model.
        exact: all state must be of one iteration, saved or replayed. Otherwise experts may be older or newer than the
            rest, and windows left by an exact policy are paths, too.
        only: resume from this iteration, and use nothing newer.

    Yields:
        A path for each iteration whose state is complete, can be replayed, or is reached by saved gradients. With
        ``exact`` off, a path requires only a complete dense part, and each expert in any checkpoint. Memory is
        preferred to storage.
    """
    usable = [checkpoint for checkpoint in checkpoints if only is None or checkpoint.iteration <= only]
    newest_first = sorted(usable, key=lambda checkpoint: (-checkpoint.iteration, checkpoint.tier))
    by_iteration: dict[int, list[AvailableCheckpoint]] = defaultdict(list)
    for checkpoint in newest_first:
        by_iteration[checkpoint.iteration].append(checkpoint)
    paths = windows(by_iteration, operators)
    if exact:
        paths = _newest_first(paths, _chained(by_iteration, newest_first, operators))
    else:
        paths = _newest_first(_with_older_experts(by_iteration, newest_first, operators), paths)
    yield from (path for path in paths if only in (None, path.iteration))


def _newest_first(preferred: Iterator[RecoveryPath], fallback: Iterator[RecoveryPath]) -> Iterator[RecoveryPath]:
    previous = None
    for path in merge(preferred, fallback, key=lambda path: -path.iteration):
        if path.iteration != previous:
            previous = path.iteration
            yield path


def windows(
    by_iteration: Mapping[int, Sequence[AvailableCheckpoint]], operators: Sequence[Operator]
) -> Iterator[RecoveryPath]:
    """Yields the windows that allow an exact resume from their end, the newest first (MoEvement, section 3.3).

    ``by_iteration`` has by iteration, the newest first, its checkpoints, the preferred ones first.
    """
    previous = None
    for start in by_iteration:
        path = window_replay(by_iteration, operators, start)
        if path is not None and path.iteration != previous:  # otherwise it only repeats more iterations
            previous = path.iteration
            yield path


def window_replay(
    by_iteration: Mapping[int, Sequence[AvailableCheckpoint]], operators: Sequence[Operator], start: int
) -> RecoveryPath | None:
    """Returns the window that starts at an iteration, or None if it is incomplete (Figure 8).

    Each operator is loaded at the first iteration where it is complete, and learns from there on. Until then, every
    checkpoint of the window must have its compute weights. A full checkpoint is a window of one iteration.
    """
    waiting, points = [operator.name for operator in operators], []
    while waiting:
        iteration, sources, later = start + len(points), {}, []
        for name in waiting:
            operator_sources = {
                (name, part): _first_with(by_iteration.get(iteration, ()), name, part) for part in (MASTER, MOMENTS)
            }
            if None in operator_sources.values():
                operator_sources = {(name, COMPUTE): _first_with(by_iteration.get(iteration, ()), name, COMPUTE)}
                later.append(name)
            if None in operator_sources.values():
                return None
            sources |= operator_sources
        points.append(ReplayPoint(iteration, sources))
        waiting = later
    return RecoveryPath(tuple(points))


def _with_older_experts(
    by_iteration: Mapping[int, Sequence[AvailableCheckpoint]],
    newest_first: Sequence[AvailableCheckpoint],
    operators: Sequence[Operator],
) -> Iterator[RecoveryPath]:
    has_gradients = {
        name for checkpoint in newest_first for name, detail in checkpoint.operators.items() if detail == _GRAD
    }
    for iteration, checkpoints in by_iteration.items():
        sources, gradients = {}, {}
        for operator in operators:
            name, candidates = operator.name, checkpoints if operator.expert is None else newest_first
            operator_sources = {(name, part): _first_with(candidates, name, part) for part in (MASTER, MOMENTS)}
            if name in has_gradients:
                past = [checkpoint for checkpoint in newest_first if checkpoint.iteration <= iteration]
                base, steps = _chain(by_iteration, past, name, iteration)
                is_live = any(
                    checkpoint is not None and checkpoint.key == (iteration, LIVE)
                    for checkpoint in operator_sources.values()
                )
                reaches_iteration = steps and steps[-1].iteration == iteration and not is_live
                if reaches_iteration or steps and all(checkpoint is base for checkpoint in operator_sources.values()):
                    operator_sources, gradients[name] = dict.fromkeys(operator_sources, base), steps
            sources |= operator_sources
        if None not in sources.values():
            yield RecoveryPath((ReplayPoint(iteration, sources, gradients),))


def _chained(
    by_iteration: Mapping[int, Sequence[AvailableCheckpoint]],
    newest_first: Sequence[AvailableCheckpoint],
    operators: Sequence[Operator],
) -> Iterator[RecoveryPath]:
    """Yields a path for each iteration that the chains of all operators reach."""
    if not any(_GRAD in checkpoint.operators.values() for checkpoint in newest_first):
        return
    for iteration in by_iteration:
        past, sources, gradients = (
            [checkpoint for checkpoint in newest_first if checkpoint.iteration <= iteration],
            {},
            {},
        )
        for name in (operator.name for operator in operators):
            base, steps = _chain(by_iteration, past, name, iteration)
            if base is None or base.iteration + len(steps) < iteration:
                break
            sources |= {(name, part): base for part in (MASTER, MOMENTS)}
            gradients |= {name: steps} if steps else {}
        else:
            yield RecoveryPath((ReplayPoint(iteration, sources, gradients),))


def _chain(
    by_iteration: Mapping[int, Sequence[AvailableCheckpoint]],
    newest_first: Iterable[AvailableCheckpoint],
    operator: str,
    until: int,
) -> tuple[AvailableCheckpoint | None, list[AvailableCheckpoint]]:
    """Returns the newest checkpoint with all of an operator, and the checkpoints with its next gradients, up to a gap.

    Gradients in superseded memory, or after a base there, are not used: they led to another state. Survivor state is
    not a base, since it has no records of its updates.
    """
    full = (checkpoint for checkpoint in newest_first if checkpoint.operators.get(operator) == Detail.FULL.value)
    base = next((checkpoint for checkpoint in full if checkpoint.tier != LIVE), None)
    steps: list[AvailableCheckpoint] = []
    if base is None or base.tier == BEFORE:
        return base, steps
    for iteration in range(base.iteration + 1, until + 1):
        candidates = (
            checkpoint for checkpoint in by_iteration.get(iteration, ()) if checkpoint.operators.get(operator) == _GRAD
        )
        checkpoint = next((checkpoint for checkpoint in candidates if checkpoint.tier != BEFORE), None)
        if checkpoint is None:
            break
        steps.append(checkpoint)
    return base, steps


def _first_with(checkpoints: Iterable[AvailableCheckpoint], operator: str, part: str) -> AvailableCheckpoint | None:
    return next(
        (checkpoint for checkpoint in checkpoints if part in PARTS.get(checkpoint.operators.get(operator, ""), ())),
        None,
    )


def needed(
    checkpoints: Iterable[AvailableCheckpoint], operators: Sequence[Operator], exact: bool, keep: int
) -> set[tuple[int, str]]:
    """Returns the keys of the checkpoints that are still needed.

    These are the checkpoints of the newest ``keep`` recovery paths and all newer ones, which may start an incomplete
    window. Without a path, all checkpoints are needed.
    """
    checkpoints = list(checkpoints)
    paths = list(islice(recovery_paths(checkpoints, operators, exact), keep))
    newest = max((path.iteration for path in paths), default=-1)
    return {checkpoint.key for path in paths for checkpoint in path.checkpoints()} | {
        checkpoint.key for checkpoint in checkpoints if checkpoint.iteration > newest
    }
