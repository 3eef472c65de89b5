"""What this rank saves of a model, for any plan."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from moc.sharding import Scheme
from moc.sharding.shares import ByteRange, StageHoldings, rank_loads, share_of, shares, stored_shares
from moc.state.detail import Detail
from moc.state.fragments import Fragment
from moc.state.interface import TrainingState
from moc.store.manifest import OperatorEntry
from moc.store.regions import Entry, FileLayout

_REMEMBERED = 64  # plans; experts selected by load form arbitrarily many sets


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's share of a plan: what it saves, and the layout of its file.

    Attributes:
        layout: of the file.
        sources: flat views of live memory, one for each entry of the layout.
        elements: by operator and slot, the number of elements.
        stored: entries that go to storage: what several nodes save goes there once.  None for all.
    """

    layout: FileLayout
    sources: tuple[torch.Tensor, ...]
    elements: Mapping[str, Mapping[str, int]]
    stored: frozenset[Entry] | None = None


def share(fragments: Iterable[Fragment]) -> Share:
    """Returns the share of these fragments; neighbours in memory are neighbours in the file.

    The same state in the same layout gives the same file in every run: nothing depends on addresses.
    """
    elements: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    views = {}
    for fragment in _as_in_memory(fragments):
        entry = Entry(fragment.name, fragment.slot, fragment.global_shape, fragment.region, fragment.view.dtype)
        views[entry] = fragment.view.view(-1)
        elements[fragment.operator][fragment.slot] += fragment.region.numel
    layout = FileLayout(views)
    return Share(layout, tuple(views[entry] for entry in layout.entries), {o: dict(n) for o, n in elements.items()})


def _as_in_memory(fragments: Iterable[Fragment]) -> list[Fragment]:
    """Sorts fragments by slot and by offset in their storage; storages by the first name in each."""
    fragments = sorted(fragments, key=lambda f: (f.slot, f.view.storage_offset(), f.name, f.region.offset))
    first: dict[tuple[str, int], tuple] = {}
    for fragment in fragments:
        first.setdefault(_memory_of(fragment), (fragment.name, fragment.region.offset))
    return sorted(fragments, key=lambda f: (f.slot, first[_memory_of(f)]))


def _memory_of(fragment: Fragment) -> tuple[str, int]:
    return fragment.slot, fragment.view.untyped_storage().data_ptr()


def joined(one: Share, other: Share) -> Share:
    """Returns the share of both, in one file; they have no entry in common."""
    entries, sources = (*one.layout.entries, *other.layout.entries), (*one.sources, *other.sources)
    of = dict(zip(entries, sources, strict=True))
    layout, elements = FileLayout(entries), dict(one.elements)
    for name, slots in other.elements.items():
        elements[name] = {**elements.get(name, {}), **slots}
    return dataclasses.replace(
        one, layout=layout, sources=tuple(of[entry] for entry in layout.entries), elements=elements
    )


class Contents:
    """This rank's shares by the sharding rules; computed once per plan, since the views stay valid.

    Args:
        state: the live state.
        holdings: which rank of this pipeline stage holds what.
        rank: of this worker.
        scheme: the rules.
        nodes: by rank, the name of its node, if each node saves what its ranks hold; otherwise empty.
    """

    def __init__(
        self, state: TrainingState, holdings: StageHoldings, rank: int, scheme: Scheme, nodes: Sequence[str] = ()
    ):
        self._state, self._rank, self._scheme = state, rank, scheme
        self._nodes = nodes if len(set(nodes)) > 1 else ()
        self.renew(holdings)

    def renew(self, holdings: StageHoldings) -> None:
        """From now on, ranks hold this, and views of another state are void."""
        self.holdings = holdings
        self._known: dict[tuple, Share] = {}
        self._fragments: dict[Detail, dict[str, list[Fragment]]] = {}

    def share(self, operators: Mapping[str, Detail]) -> Share:
        """Returns what this rank saves of operators, each at its detail."""
        key = tuple(operators.items())
        if key not in self._known:
            if len(self._known) == _REMEMBERED:
                self._known.pop(next(iter(self._known)))
            self._known[key] = self._share(operators)
        return self._known[key]

    def _share(self, operators: Mapping[str, Detail]) -> Share:
        mine = share(self._mine(operators, shares))
        if not self._nodes:
            return mine
        stored = share(self._mine(operators, stored_shares)).layout.entries
        return mine if len(stored) == len(mine.layout.entries) else dataclasses.replace(mine, stored=frozenset(stored))

    def _mine(
        self, operators: Mapping[str, Detail], of_ranks: Callable[..., dict[int, list[ByteRange]]]
    ) -> list[Fragment]:
        held = [fragment for operator, detail in operators.items() for fragment in self._held(operator, detail)]
        parts = of_ranks(self.holdings, operators, self._scheme, self._nodes).get(self._rank, [])
        return share_of(held, parts, joins=not self._nodes)

    def _held(self, operator: str, detail: Detail) -> list[Fragment]:
        """Returns this rank's fragments of an operator; cached, since each iteration may have a new plan."""
        if detail not in self._fragments:
            self._fragments[detail] = defaultdict(list)
            for fragment in self._state.fragments(self._state.operators(), detail):
                self._fragments[detail][fragment.operator].append(fragment)
        return self._fragments[detail].get(operator, [])

    def loads(self, operators: Mapping[str, Detail]) -> Mapping[int, int]:
        """Bytes of these operators by rank of this stage, where any, without file headers."""
        return rank_loads(self.holdings, operators, self._scheme, self._nodes)

    def with_gradients(self, operators: Mapping[str, Detail], of: Iterable[str]) -> Share:
        """Returns the :meth:`share` of operators, with the gradients of some of them beside their state."""
        mine, gradients = self.share(operators), dict.fromkeys(sorted(of), Detail.GRAD)
        return joined(mine, self.share(gradients)) if gradients else mine

    def entries(self, operators: Mapping[str, Detail], mine: Share | None = None) -> dict[str, OperatorEntry]:
        """Returns the manifest entries of this rank's share, with the updates that its moments have seen so far."""
        steps = self._state.steps()
        return {
            name: OperatorEntry(operators[name].value, steps.get(name), slots)
            for name, slots in (mine or self.share(operators)).elements.items()
        }
