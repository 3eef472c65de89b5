"""From which checkpoint each operator comes back: a pure function of the checkpoints that there are.

An exact policy goes on from one checkpoint.  With partial experts checkpointing (MoC-System, section 5.1) what is not
an expert comes from the newest checkpoint that has all of it, and each expert from wherever its newest state is: the
memory of a node that survived, or storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moc.state.detail import Detail
from moc.state.operators import Operator

MEMORY, STORAGE = "memory", "storage"
MASTER, MOMENTS = "master", "moments"
PARTS = {
    Detail.FULL.value: (MASTER, MOMENTS),
    Detail.MASTER.value: (MASTER,),
    Detail.MOMENTS.value: (MOMENTS,),
}
"""By detail, the parts of an operator's state that it holds; other details hold nothing that could be trained."""


def part_of_slot(slot: str) -> str:
    """The part of an operator's state that a slot belongs to."""
    return MASTER if slot in ("master", "param") else MOMENTS


@dataclass(frozen=True)
class Held:
    """One checkpoint, as far as it can be read.

    Attributes:
        iteration: iterations completed.
        tier: :data:`MEMORY` or :data:`STORAGE`.
        operators: by name of the operators that are whole in it, the detail.
    """

    iteration: int
    tier: str
    operators: Mapping[str, str]

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from the others."""
        return self.iteration, self.tier


@dataclass(frozen=True)
class Recovery:
    """A way to go on.

    Attributes:
        iteration: from here.
        sources: by operator and part of its state, the checkpoint that it comes from.
    """

    iteration: int
    sources: Mapping[tuple[str, str], Held]

    @property
    def base(self) -> Held:
        """The checkpoint that what is not a tensor comes from: of those of this iteration that are used, storage.

        All workers read it.  Memory can be read by all only where no node is lost, and then nothing of this iteration
        comes from storage.
        """
        of_this = [held for held in self.sources.values() if held.iteration == self.iteration]
        return next((held for held in of_this if held.tier == STORAGE), of_this[0])

    def used(self) -> list[Held]:
        """All checkpoints that something comes from, the newest first."""
        distinct = {held.key: held for held in self.sources.values()}
        return [distinct[key] for key in sorted(distinct, key=lambda key: (-key[0], key[1]))]


def recoveries(
    held: Iterable[Held], operators: Sequence[Operator], exact: bool, only: int | None = None
) -> Iterator[Recovery]:
    """The ways to go on, the newest iteration first.

    Args:
        held: the checkpoints that there are.
        operators: of the model.
        exact: everything must come from one iteration; if not, experts may be older or newer than the rest.
        only: go on from this iteration, and take nothing that is newer.

    Yields:
        For each iteration at which everything, or with ``exact`` off all that is not an expert, is held, and each
        expert somewhere: where it all comes from.  Memory is preferred to storage.
    """
    usable = [one for one in held if only is None or one.iteration <= only]
    newest_first = sorted(usable, key=lambda one: (-one.iteration, one.tier))
    for iteration in dict.fromkeys(one.iteration for one in newest_first):
        if only in (None, iteration):
            there = [one for one in newest_first if one.iteration == iteration]
            sources = _sources(operators, there, there if exact else newest_first)
            if sources is not None:
                yield Recovery(iteration, sources)


def _sources(
    operators: Sequence[Operator], there: list[Held], for_experts: list[Held]
) -> dict[tuple[str, str], Held] | None:
    sources = {}
    for operator in operators:
        candidates = there if operator.expert is None else for_experts
        for part in (MASTER, MOMENTS):
            found = next((one for one in candidates if part in PARTS.get(one.operators.get(operator.name), ())), None)
            if found is None:
                return None
            sources[operator.name, part] = found
    return sources


def needed(held: Iterable[Held], operators: Sequence[Operator], exact: bool, keep: int) -> set[tuple[int, str]]:
    """Keys of the checkpoints without which the newest ``keep`` ways to go on would be others."""
    ways = []
    for way in recoveries(held, operators, exact):
        ways.append(way)
        if len(ways) == keep:
            break
    return {one.key for way in ways for one in way.used()}
