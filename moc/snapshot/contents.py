"""Selects this rank's share of the model for any plan."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from moc.sharding import ShardingScheme
from moc.sharding.save_plan import (
    ByteRange,
    StageReplicas,
    plan_shards,
    plan_storage_shards,
    planned_bytes_by_rank,
    select_fragments,
)
from moc.state.interface import TrainingState
from moc.state.operators import Detail, Fragment
from moc.store.manifest import OperatorEntry
from moc.store.shard_file import FileLayout, TensorBox

_REMEMBERED = 64  # plans; experts selected by load form arbitrarily many sets


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's share of a plan: the saved state, and the layout of its file.

    Attributes:
        layout: of the file.
        sources: flat views of live memory, one for each entry of the layout.
        elements: by operator and slot, the number of elements.
        stored: entries for storage, which has data of several nodes only once. None for all.
    """

    layout: FileLayout
    sources: tuple[torch.Tensor, ...]
    elements: Mapping[str, Mapping[str, int]]
    stored: frozenset[TensorBox] | None = None


@dataclass(frozen=True, eq=False)
class _Saved:
    """A fragment as saved in a file.

    Attributes:
        operator: that it belongs to.
        entry: its description.
        values: a flat view of its live memory.
        elements: number of them.
        memory: slot and storage of the values.
        order: within these.
    """

    operator: str
    entry: TensorBox
    values: torch.Tensor
    elements: int
    memory: tuple[str, int]
    order: tuple


def share(fragments: Iterable[Fragment]) -> Share:
    """Returns the share of these fragments; neighbours in memory are neighbours in the file.

    The same state in the same layout gives the same file in every run, since nothing depends on addresses.
    """
    return _share_of(map(_saved, fragments))


def _saved(fragment: Fragment) -> _Saved:
    one, view = fragment, fragment.view
    entry = TensorBox(one.name, one.slot, one.global_shape, one.region, view.dtype)
    memory = one.slot, view.untyped_storage().data_ptr()
    order = one.slot, view.storage_offset(), one.name, one.region.offset
    return _Saved(one.operator, entry, view.view(-1), view.numel(), memory, order)


def _share_of(saved: Iterable[_Saved]) -> Share:
    elements: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    ordered = _as_in_memory(saved)
    for one in ordered:
        elements[one.operator][one.entry.slot] += one.elements
    return _laid_out(((one.entry, one.values) for one in ordered), {o: dict(n) for o, n in elements.items()})


def _laid_out(parts: Iterable[tuple[TensorBox, torch.Tensor]], elements: Mapping[str, Mapping[str, int]]) -> Share:
    ordered = sorted(parts, key=lambda part: -part[0].itemsize)  # the file then keeps this order
    return Share(FileLayout(entry for entry, _ in ordered), tuple(source for _, source in ordered), elements)


def _as_in_memory(saved: Iterable[_Saved]) -> list[_Saved]:
    """Sorts by slot and by offset in their storage; storages by the first name in each."""
    ordered, first = sorted(saved, key=attrgetter("order")), {}
    for one in ordered:
        first.setdefault(one.memory, one.order[2:])
    return sorted(ordered, key=lambda one: (one.memory[0], first[one.memory]))


def joined(one: Share, other: Share) -> Share:
    """Returns the share of both, in one file; they have no entry in common."""
    elements = dict(one.elements)
    for name, slots in other.elements.items():
        elements[name] = {**elements.get(name, {}), **slots}
    parts = (part for share in (one, other) for part in zip(share.layout.entries, share.sources, strict=True))
    return dataclasses.replace(_laid_out(parts, elements), stored=one.stored)


class Contents:
    """This rank's shares by the sharding rules; computed once per plan, since the views stay valid.

    Args:
        state: the live state.
        holdings: state held by each rank of this pipeline stage.
        rank: of this worker.
        scheme: the rules.
        nodes: by rank, the name of its node, if each node saves the state of its ranks; otherwise empty.
    """

    def __init__(
        self,
        state: TrainingState,
        holdings: StageReplicas,
        rank: int,
        scheme: ShardingScheme,
        nodes: Sequence[str] = (),
    ):
        self._state, self._rank, self._scheme = state, rank, scheme
        self._nodes = nodes if len(set(nodes)) > 1 else ()
        self.renew(holdings)

    def renew(self, holdings: StageReplicas) -> None:
        """Replaces the holdings of ranks, and discards views of the previous state."""
        self.holdings = holdings
        self._known: dict[tuple, Share] = {}
        self._fragments: dict[Detail, dict[str, list[Fragment]]] = {}
        self._saved: dict[tuple[str, Detail], dict[tuple[ByteRange, ...], list[_Saved]]] = defaultdict(dict)

    def share(self, operators: Mapping[str, Detail]) -> Share:
        """Returns this rank's share of operators, each at its detail."""
        key = tuple(operators.items())
        if key not in self._known:
            if len(self._known) == _REMEMBERED:
                self._known.pop(next(iter(self._known)))
            self._known[key] = self._share(operators)
        return self._known[key]

    def _share(self, operators: Mapping[str, Detail]) -> Share:
        mine = _share_of(self._mine(operators, plan_shards))
        if not self._nodes:
            return mine
        stored = _share_of(self._mine(operators, plan_storage_shards)).layout.entries
        return mine if len(stored) == len(mine.layout.entries) else dataclasses.replace(mine, stored=frozenset(stored))

    def _mine(
        self, operators: Mapping[str, Detail], of_ranks: Callable[..., dict[int, list[ByteRange]]]
    ) -> Iterator[_Saved]:
        parts: dict[str, list[ByteRange]] = defaultdict(list)
        for part in of_ranks(self.holdings, operators, self._scheme, self._nodes).get(self._rank, []):
            parts[part.operator].append(part)
        for operator, detail in operators.items():
            yield from self._parts(operator, detail, tuple(parts.get(operator, ())))

    def _parts(self, operator: str, detail: Detail, parts: tuple[ByteRange, ...]) -> list[_Saved]:
        """Returns this rank's share of an operator; cached, since plans have different operators."""
        known = self._saved[operator, detail]
        if parts not in known:
            if len(known) == _REMEMBERED:
                known.pop(next(iter(known)))
            mine = select_fragments(self._held(operator, detail), parts, merges_adjacent=not self._nodes)
            known[parts] = list(map(_saved, mine))
        return known[parts]

    def _held(self, operator: str, detail: Detail) -> list[Fragment]:
        """Returns this rank's fragments of an operator; describes all operators in one call."""
        if detail not in self._fragments:
            self._fragments[detail] = defaultdict(list)
            for fragment in self._state.fragments(self._state.operators(), detail):
                self._fragments[detail][fragment.operator].append(fragment)
        return self._fragments[detail].get(operator, [])

    def loads(self, operators: Mapping[str, Detail]) -> Mapping[int, int]:
        """Returns the bytes of these operators by rank of this stage, where any, without file headers."""
        return planned_bytes_by_rank(self.holdings, operators, self._scheme, self._nodes)

    def with_gradients(self, operators: Mapping[str, Detail], of: Iterable[str]) -> Share:
        """Returns the :meth:`share` of operators, and the gradients of some of them in addition to their state."""
        mine, gradients = self.share(operators), dict.fromkeys(sorted(of), Detail.GRAD)
        return joined(mine, self.share(gradients)) if gradients else mine

    def entries(self, operators: Mapping[str, Detail], mine: Share | None = None) -> dict[str, OperatorEntry]:
        """Returns the manifest entries of this rank's share, with the number of updates in its moments."""
        steps = self._state.steps()
        return {
            name: OperatorEntry(operators[name].value, steps.get(name), slots)
            for name, slots in (mine or self.share(operators)).elements.items()
        }
