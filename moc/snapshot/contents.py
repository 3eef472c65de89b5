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
    view = fragment.view
    entry = TensorBox(fragment.name, fragment.slot, fragment.global_shape, fragment.region, view.dtype)
    memory = fragment.slot, view.untyped_storage().data_ptr()
    order = fragment.slot, view.storage_offset(), fragment.name, fragment.region.offset
    return _Saved(fragment.operator, entry, view.view(-1), view.numel(), memory, order)


def _share_of(saved: Iterable[_Saved]) -> Share:
    elements: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    ordered = _as_in_memory(saved)
    for chunk in ordered:
        elements[chunk.operator][chunk.entry.slot] += chunk.elements
    return _laid_out(((chunk.entry, chunk.values) for chunk in ordered), {o: dict(n) for o, n in elements.items()})


def _laid_out(parts: Iterable[tuple[TensorBox, torch.Tensor]], elements: Mapping[str, Mapping[str, int]]) -> Share:
    ordered = sorted(parts, key=lambda part: -part[0].itemsize)  # the file then keeps this order
    return Share(FileLayout(entry for entry, _ in ordered), tuple(source for _, source in ordered), elements)


def _as_in_memory(saved: Iterable[_Saved]) -> list[_Saved]:
    """Sorts by slot and by offset in their storage; storages by the first name in each."""
    ordered, first = sorted(saved, key=attrgetter("order")), {}
    for chunk in ordered:
        first.setdefault(chunk.memory, chunk.order[2:])
    return sorted(ordered, key=lambda chunk: (chunk.memory[0], first[chunk.memory]))


def joined(first: Share, second: Share) -> Share:
    """Returns the share of both, in one file; they have no entry in common."""
    elements = dict(first.elements)
    for name, slots in second.elements.items():
        elements[name] = {**elements.get(name, {}), **slots}
    parts = (part for share in (first, second) for part in zip(share.layout.entries, share.sources, strict=True))
    return dataclasses.replace(_laid_out(parts, elements), stored=first.stored)


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
        self._shares: dict[tuple, Share] = {}
        self._fragments: dict[Detail, dict[str, list[Fragment]]] = {}
        self._saved: dict[tuple[str, Detail], dict[tuple[ByteRange, ...], list[_Saved]]] = defaultdict(dict)

    def share(self, operators: Mapping[str, Detail]) -> Share:
        """Returns this rank's share of operators, each at its detail."""
        key = tuple(operators.items())
        if key not in self._shares:
            if len(self._shares) == _REMEMBERED:
                self._shares.pop(next(iter(self._shares)))
            self._shares[key] = self._share(operators)
        return self._shares[key]

    def _share(self, operators: Mapping[str, Detail]) -> Share:
        local_share = _share_of(self._local_chunks(operators, plan_shards))
        if not self._nodes:
            return local_share
        stored = _share_of(self._local_chunks(operators, plan_storage_shards)).layout.entries
        if len(stored) == len(local_share.layout.entries):
            return local_share
        return dataclasses.replace(local_share, stored=frozenset(stored))

    def _local_chunks(
        self, operators: Mapping[str, Detail], bytes_of_ranks: Callable[..., dict[int, list[ByteRange]]]
    ) -> Iterator[_Saved]:
        parts: dict[str, list[ByteRange]] = defaultdict(list)
        for part in bytes_of_ranks(self.holdings, operators, self._scheme, self._nodes).get(self._rank, []):
            parts[part.operator].append(part)
        for operator, detail in operators.items():
            yield from self._parts(operator, detail, tuple(parts.get(operator, ())))

    def _parts(self, operator: str, detail: Detail, parts: tuple[ByteRange, ...]) -> list[_Saved]:
        """Returns this rank's share of an operator; cached, since plans have different operators."""
        parts_by_range = self._saved[operator, detail]
        if parts not in parts_by_range:
            if len(parts_by_range) == _REMEMBERED:
                parts_by_range.pop(next(iter(parts_by_range)))
            fragments = select_fragments(
                self._local_fragments(operator, detail), parts, merges_adjacent=not self._nodes
            )
            parts_by_range[parts] = list(map(_saved, fragments))
        return parts_by_range[parts]

    def _local_fragments(self, operator: str, detail: Detail) -> list[Fragment]:
        """Returns this rank's fragments of an operator; describes all operators in one call."""
        if detail not in self._fragments:
            self._fragments[detail] = defaultdict(list)
            for fragment in self._state.fragments(self._state.operators(), detail):
                self._fragments[detail][fragment.operator].append(fragment)
        return self._fragments[detail].get(operator, [])

    def loads(self, operators: Mapping[str, Detail]) -> Mapping[int, int]:
        """Returns the bytes of these operators by rank of this stage, where any, without file headers."""
        return planned_bytes_by_rank(self.holdings, operators, self._scheme, self._nodes)

    def with_gradients(self, operators: Mapping[str, Detail], gradient_operators: Iterable[str]) -> Share:
        """Returns the :meth:`share` of operators, and the gradients of some of them in addition to their state."""
        local_share, gradients = self.share(operators), dict.fromkeys(sorted(gradient_operators), Detail.GRAD)
        return joined(local_share, self.share(gradients)) if gradients else local_share

    def entries(self, operators: Mapping[str, Detail], local_share: Share | None = None) -> dict[str, OperatorEntry]:
        """Returns the manifest entries of this rank's share, with the number of updates in its moments."""
        steps = self._state.steps()
        return {
            name: OperatorEntry(operators[name].value, steps.get(name), slots)
            for name, slots in (local_share or self.share(operators)).elements.items()
        }
