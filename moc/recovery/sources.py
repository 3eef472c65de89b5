"""From which checkpoint each operator comes back: a pure function of the checkpoints that there are.

An exact policy goes on from one moment.  A checkpoint may hold all of it; or checkpoints of iterations that follow each
other do together, if the iterations between are computed again (MoEvement, section 3.3).  With partial experts
checkpointing (MoC-System, section 5.1) what is not an expert comes from the newest checkpoint that has all of it, and
each expert from wherever its newest state is: the memory of a node that survived, or storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import merge
from itertools import islice

from moc.state.detail import Detail
from moc.state.operators import Operator

MEMORY, STORAGE = "memory", "storage"
BEFORE = "memory before"
"""Memory of a time line that was given up, in which some experts are newer than the rest."""
MASTER, MOMENTS, COMPUTE = "master", "moments", "compute"
PARTS = {
    Detail.FULL.value: (MASTER, MOMENTS),
    Detail.MASTER.value: (MASTER,),
    Detail.MOMENTS.value: (MOMENTS,),
    Detail.COMPUTE.value: (COMPUTE,),
}
"""By detail, the parts of an operator's state that it holds; what has only the last of them can compute, not learn."""


def part_of_slot(slot: str) -> str:
    """The part of the state of an operator that learns, that a slot belongs to."""
    return MASTER if slot in ("master", "param") else MOMENTS


@dataclass(frozen=True)
class AvailableCheckpoint:
    """One checkpoint, as far as it can be read.

    Attributes:
        iteration: iterations completed.
        tier: :data:`MEMORY`, :data:`STORAGE`, or :data:`BEFORE`.
        operators: by name of the operators that are whole in it, the detail.
        policy: name of the policy that planned it.
    """

    iteration: int
    tier: str
    operators: Mapping[str, str]
    policy: str = field(default="", compare=False)

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from the others."""
        return self.iteration, self.tier

    def without(self, damaged: Collection[str] | None) -> AvailableCheckpoint | None:
        """What is left of it if these operators are damaged; nothing where all are, or nobody knows which."""
        left = {} if damaged is None else {n: detail for n, detail in self.operators.items() if n not in damaged}
        return replace(self, operators=left) if left and len(left) < len(self.operators) else None

    def has(self, iteration: int, tier: str, operators: Mapping[str, Detail]) -> bool:
        """Whether it is that of an iteration in a tier, and has these operators as they were to be saved."""
        details = {name: detail.value for name, detail in operators.items()}
        return self.key == (iteration, tier) and details.items() <= dict(self.operators).items()


Sources = Mapping[tuple[str, str], AvailableCheckpoint]
"""By operator and part of its state, the checkpoint that it comes from."""


@dataclass(frozen=True)
class ReplayPoint:
    """What is loaded before an iteration is computed again, or at last before the run goes on.

    Attributes:
        iteration: iterations completed.
        sources: where what is loaded comes from; operators that were whole at an earlier moment are not loaded again.
    """

    iteration: int
    sources: Sources

    @property
    def full(self) -> tuple[str, ...]:
        """The operators that learn from here on."""
        return tuple(name for name, part in self.sources if part == MASTER)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Those that can compute here, and do not learn yet."""
        return tuple(name for name, part in self.sources if part == COMPUTE)

    def used(self) -> list[AvailableCheckpoint]:
        """The checkpoints that something comes from, the newest first."""
        distinct = {held.key: held for held in self.sources.values()}
        return [distinct[key] for key in sorted(distinct, key=lambda key: (-key[0], key[1]))]


@dataclass(frozen=True)
class RecoveryPath:
    """A way to go on.

    Attributes:
        moments: what is loaded, one moment after the other; between two of them an iteration is computed again.
    """

    moments: tuple[ReplayPoint, ...]

    @property
    def iteration(self) -> int:
        """From here."""
        return self.moments[-1].iteration

    @cached_property
    def sources(self) -> Sources:
        """Where the state comes from that operators learn with."""
        return {key: held for moment in self.moments for key, held in moment.sources.items() if key[1] != COMPUTE}

    @property
    def base(self) -> AvailableCheckpoint:
        """The checkpoint that what is not a tensor comes from."""
        return self.at(self.iteration)

    def moment(self, iteration: int) -> ReplayPoint | None:
        """What is loaded where so many iterations are completed, if anything."""
        return next((moment for moment in self.moments if moment.iteration == iteration), None)

    def at(self, iteration: int) -> AvailableCheckpoint:
        """The checkpoint that tells what is not a tensor of one of its moments: of those that are used, storage.

        All workers read it.  Memory can be read by all only where no node is lost, and then nothing of this iteration
        comes from storage.
        """
        of_this = [held for held in self.used() if held.iteration == iteration]
        return next((held for held in of_this if held.tier == STORAGE), of_this[0])

    def used(self) -> list[AvailableCheckpoint]:
        """All checkpoints that something comes from, the newest first."""
        return [held for moment in reversed(self.moments) for held in moment.used()]

    def learned_until(self, operator: str) -> int:
        """The last iteration whose update is in the state that an operator goes on with."""
        if len(self.moments) > 1:
            return self.iteration
        return min(self.sources[operator, MASTER].iteration, self.iteration)  # a newer one has learned what counts


def recoveries(
    held: Iterable[AvailableCheckpoint], operators: Sequence[Operator], exact: bool, only: int | None = None
) -> Iterator[RecoveryPath]:
    """The ways to go on, the newest iteration first.

    Args:
        held: the checkpoints that there are.
        operators: of the model.
        exact: everything must be of one iteration, as it was saved or as it is computed again; if not, experts may be
            older or newer than the rest, and windows that an exact policy has left are ways, too.
        only: go on from this iteration, and take nothing that is newer.

    Yields:
        For each iteration at which everything, or with ``exact`` off all that is not an expert, is held or can be
        computed, and each expert somewhere: where it all comes from.  Memory is preferred to storage.
    """
    usable = [one for one in held if only is None or one.iteration <= only]
    newest_first = sorted(usable, key=lambda one: (-one.iteration, one.tier))
    there: dict[int, list[AvailableCheckpoint]] = defaultdict(list)
    for one in newest_first:
        there[one.iteration].append(one)
    found = windows(there, operators)
    if not exact:
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
    """The windows from whose end a run can go on to the last bit, the newest first (MoEvement, section 3.3).

    Args:
        there: by iteration the checkpoints that there are, those that are preferred first; the newest iteration first.
        operators: of the model.
    """
    last = None
    for start in there:
        way = window_replay(there, operators, start)
        if way is not None and way.iteration != last:  # else it would compute more for the same
            last = way.iteration
            yield way


def window_replay(
    there: Mapping[int, Sequence[AvailableCheckpoint]], operators: Sequence[Operator], start: int
) -> RecoveryPath | None:
    """The window that begins with an iteration, each operator taken from where it is whole first.

    Before that it must be there as compute weights, in every iteration from the first one on; after it, it learns by
    itself.  A checkpoint of everything is a window of one iteration.

    Args:
        there: by iteration, the checkpoints that there are.
        operators: of the model.
        start: the first iteration.

    Returns:
        What to load when (Figure 8); None if there is no such window.
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
    for iteration, of_this in there.items():
        sources = {
            (operator.name, part): found
            for operator in operators
            for part in (MASTER, MOMENTS)
            if (found := _first(of_this if operator.expert is None else newest_first, operator.name, part)) is not None
        }
        if len(sources) == 2 * len(operators):
            yield RecoveryPath((ReplayPoint(iteration, sources),))


def _first(held: Iterable[AvailableCheckpoint], operator: str, part: str) -> AvailableCheckpoint | None:
    return next((one for one in held if part in PARTS.get(one.operators.get(operator, ""), ())), None)


def needed(
    held: Iterable[AvailableCheckpoint], operators: Sequence[Operator], exact: bool, keep: int
) -> set[tuple[int, str]]:
    """Keys of the checkpoints that are of use.

    Args:
        held: those that there are.
        operators: of the model.
        exact: as in :func:`recoveries`.
        keep: how many ways to go on are wanted.

    Returns:
        Those without which the newest ``keep`` ways would be others, and those that are newer than these: they may
        be the begin of a window that is not complete yet.  All, where there is no way at all.
    """
    held = list(held)
    ways = list(islice(recoveries(held, operators, exact), keep))
    newest = max((way.iteration for way in ways), default=-1)
    return {one.key for way in ways for one in way.used()} | {one.key for one in held if one.iteration > newest}
