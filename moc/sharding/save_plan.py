"""Computes each rank's share of a checkpoint from live tensor chunks by the sharding rules.

    holdings = describe(state.fragments(operators, detail), detail)  # per detail that a policy may plan
    # once: all-gather pack(holdings) within the pipeline stage; only its ranks can hold copies
    stage = StageHoldings({rank: unpack(text) for rank, text in gathered.items()})
    parts = shares(stage, {operator: detail, ...}, scheme)           # per plan, without communication
    mine = share_of(state.fragments(...), parts.get(rank, []))

With snapshots in node memory, each node saves the state of its ranks, so that it can resume from its own memory.  State
that is identical on several nodes has a copy on each, in the same pieces; one of them is written to storage.  Nothing
here communicates or needs torch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from moc.files.decode import parse
from moc.sharding.assignment import Scheme, ShardingError, assign_items
from moc.sharding.save_items import Item, cut_large
from moc.state.detail import Detail
from moc.state.operators import is_module_state
from moc.state.region import boxes_of_range

if TYPE_CHECKING:  # imports torch
    from moc.state.fragments import Fragment

_OPTIMIZER, _MODULES = "optimizer", "modules"
_SLOTS = {"param": "weights", "grad": "gradients"}
""":class:`Item` slot of each chunk slot, except for module state; all others belong to the optimizer."""


class Holding(NamedTuple):
    """Part of one operator on one rank, as described to the other ranks.

    An operator has up to one holding for state shared by all tensor-parallel ranks, one for this rank's slices, and one
    for state saved only by this rank.  A router's biases add one more.

    Attributes:
        operator: name of the operator.
        detail: value of the :class:`~moc.state.detail.Detail`.
        slot: as in :class:`~moc.sharding.save_items.Item`.
        copy: identifier, equal on all ranks that hold the same boxes of the same tensors in the same slots.  Empty for
            state that this rank saves regardless of the rules: its slices of ZeRO's optimizer state.
        nbytes: size in bytes.
        total: bytes of the same slots of these tensors in the unpartitioned model; 0 if ``copy`` is empty.
    """

    operator: str
    detail: str
    slot: str
    copy: str
    nbytes: int
    total: int


class ByteRange(NamedTuple):
    """Bytes [start, stop) of the holding ``copy`` of an operator: see :class:`Holding`."""

    operator: str
    copy: str
    start: int
    stop: int


def describe(fragments: Iterable[Fragment], detail: Detail) -> list[Holding]:
    """Returns this rank's holdings.

    For replicated state, only copies on the first stage that holds it are candidates: embeddings tied across stages are
    saved with the embedding.  For state that ZeRO shards, the first copy is always saved; it is described only because
    it counts as load.  There are at most four holdings per operator, for any number of tensors.
    """
    return [group.holding(detail.value) for group in _groups(fragments)]


def pack(holdings: Sequence[Holding]) -> bytes:
    """Serializes holdings, at about 15 bytes each.

    A rank with 300 operators in two details (DeepSeek-MoE-16B in one stage, with 8 expert-parallel ranks) sends about 9
    kB.  So 1,000 ranks of a stage gather about 9 MB, once per model and layout.
    """
    parts = ([holding for holding in holdings if bool(holding.copy) == has_copies] for has_copies in (True, False))
    copies, alone = (zlib.compress(json.dumps(part, separators=(",", ":")).encode()) for part in parts)
    return len(copies).to_bytes(4, "big") + copies + alone


def unpack(text: bytes) -> list[Holding]:
    """Restores holdings from the bytes of :func:`pack`; holdings with copies are first."""
    middle = 4 + int.from_bytes(text[:4], "big")
    return [*_inflated(text[4:middle]), *_inflated(text[middle:])]


@functools.lru_cache(maxsize=64)  # replicas of the same experts describe identical copies
def _inflated(text: bytes) -> tuple[Holding, ...]:
    return tuple(Holding(*row) for row in parse(zlib.decompress(text)))


class StageHoldings:
    """Holdings of all ranks of one pipeline stage.

    Args:
        told: holdings of every rank of the stage, from :func:`describe`, all details together.

    Attributes:
        ranks: ranks of the stage.

    Raises:
        ShardingError: the holdings of an operator overlap or are incomplete.
    """

    def __init__(self, told: Mapping[int, Sequence[Holding]]):
        self.ranks = frozenset(told)
        ranks: dict[Holding, list[int]] = defaultdict(list)
        for rank in sorted(told):
            for holding in told[rank]:
                ranks[holding].append(rank)
        slots: dict[tuple[str, str, str], list[Holding]] = defaultdict(list)
        for holding in sorted(ranks, key=lambda holding: not holding.copy):  # the order of unpack()
            slots[holding.operator, holding.detail, holding.slot].append(holding)
        known = {holders: holders for holders in map(tuple, ranks.values())}  # thousands of operators share a few
        self._items: dict[tuple[str, str], list[Item]] = defaultdict(list)
        self._copies: dict[tuple[str, str, str, int | None], str | None] = {}
        for (operator, detail, slot), holdings in slots.items():
            for number, holding in _numbered(holdings):
                together = known[tuple(ranks[holding])]
                for holders in [together] if holding.copy else [(rank,) for rank in together]:
                    item = Item(operator, slot, number, 0, holding.nbytes, holders)
                    self._items[operator, detail].append(item)
                self._copies[operator, detail, slot, number] = holding.copy or None

    def items(self, plan: Mapping[str, Detail]) -> list[Item]:
        """Returns the uncut save items of a checkpoint, without other stages' operators; identical on every rank."""
        wanted = {(operator, detail.value) for operator, detail in plan.items()}
        return [item for key, items in self._items.items() if key in wanted for item in items]

    def copy(self, item: Item, detail: Detail) -> str | None:
        """Returns the ``copy`` of an item's (or piece's) :class:`Holding`; None if only one rank can save it."""
        return self._copies[item.operator, detail.value, item.slot, item.slice]


def shares(
    stage: StageHoldings, plan: Mapping[str, Detail], scheme: Scheme, nodes: Sequence[str] = ()
) -> dict[int, list[ByteRange]]:
    """Returns the shares of replicated state of each rank of a stage; identical on every rank, without communication.

    Operators are not cut, as in MoC's section 4, unless they exceed an even share of their holders
    (:func:`moc.sharding.cut_large`).  Operators of other stages are ignored.

    Args:
        stage: holdings of all ranks.
        plan: operators, each at its detail.
        scheme: the rules.
        nodes: by rank, the name of its node; each node then saves the state of its ranks.  Empty to ignore nodes.

    Returns:
        Byte ranges by rank, which together cover every byte of every copy exactly once, on each node that has it.

    Raises:
        ShardingError: as :func:`moc.sharding.assignment`.
    """
    return _ranges(stage, plan, _assigned(stage, plan, scheme, nodes))


def stored_shares(
    stage: StageHoldings, plan: Mapping[str, Detail], scheme: Scheme, nodes: Sequence[str]
) -> dict[int, list[ByteRange]]:
    """Returns the part of :func:`shares` for storage: the rules choose one of the ranks that save an item."""
    savers: dict[Item, list[int]] = defaultdict(list)
    for item, rank in _assigned(stage, plan, scheme, nodes):
        savers[dataclasses.replace(item, holders=())].append(rank)
    items = [dataclasses.replace(item, holders=tuple(sorted(ranks))) for item, ranks in savers.items()]
    return _ranges(stage, plan, zip(items, assign_items(items, scheme), strict=True))


def rank_loads(
    stage: StageHoldings, plan: Mapping[str, Detail], scheme: Scheme, nodes: Sequence[str] = ()
) -> Counter[int]:
    """Returns the bytes of each rank of a stage under a plan (:func:`shares`), without ranks that save nothing."""
    load: Counter[int] = Counter()
    for item, rank in _assigned(stage, plan, scheme, nodes):
        load[rank] += item.nbytes
    return load


def nodes_alike(
    stage: StageHoldings, plan: Mapping[str, Detail], nodes: Sequence[str]
) -> dict[tuple[str, ...], dict[str, int]]:
    """Returns the operators of a stage with identical copies on several nodes, by these nodes, with bytes per copy.

    ``nodes`` names the node of each rank.
    """
    found: dict[tuple[str, ...], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for item in stage.items(plan):
        if len(of := tuple(dict.fromkeys(nodes[rank] for rank in item.holders))) > 1:
            found[of][item.operator] += item.nbytes
    return {of: dict(operators) for of, operators in found.items()}


def _assigned(
    stage: StageHoldings, plan: Mapping[str, Detail], scheme: Scheme, nodes: Sequence[str]
) -> list[tuple[Item, int]]:
    items = [part for item in cut_large(stage.items(plan)) for part in _by_node(item, nodes)]  # identical on all nodes
    return list(zip(items, assign_items(items, scheme), strict=True))


def _by_node(item: Item, nodes: Sequence[str]) -> list[Item]:
    """Returns the item once for each node that holds it."""
    if not nodes or len(item.holders) == 1:
        return [item]
    on: dict[str, list[int]] = defaultdict(list)
    for rank in item.holders:
        on[nodes[rank]].append(rank)
    return [item] if len(on) == 1 else [dataclasses.replace(item, holders=tuple(ranks)) for ranks in on.values()]


def _ranges(
    stage: StageHoldings, plan: Mapping[str, Detail], assigned: Iterable[tuple[Item, int]]
) -> dict[int, list[ByteRange]]:
    result: dict[int, list[ByteRange]] = defaultdict(list)
    for item, rank in assigned:
        copy = stage.copy(item, plan[item.operator])
        if copy is not None:
            result[rank].append(ByteRange(item.operator, copy, item.start, item.stop))
    return dict(result)


def share_of(fragments: Iterable[Fragment], parts: Sequence[ByteRange], joins: bool = True) -> list[Fragment]:
    """Returns the tensor chunks that this rank saves, as views of live memory, cut where an operator was cut.

    Args:
        fragments: tensor chunks of this rank.
        parts: this rank's entry of :func:`shares`; its slices of ZeRO's optimizer state are also saved.
        joins: merge adjacent parts.  Otherwise all nodes with identical parts save the same boxes.

    Raises:
        ShardingError: a part is not among the fragments.
    """
    spans: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for part in parts:
        spans[part.operator, part.copy].append((part.start, part.stop))
    result = []
    for group in _groups(fragments):
        mine = [(0, group.nbytes)] if group.alone else spans.pop((group.operator, group.copy), [])
        for start, stop in _joined(mine) if joins else sorted(mine):
            result.extend(group.between(start, stop))
    if spans:
        operator = next(iter(spans))[0]
        raise ShardingError(
            f"this rank is to save a part of {operator} which is not among its fragments: model, layout or detail are "
            "not the described ones. Fix: describe and gather them again",
            code="holdings-misfit",
        )
    return result


@dataclass(frozen=True)
class _Box:
    """Slots of one box of a tensor."""

    slots: list[Fragment]

    @property
    def element_bytes(self) -> int:
        return sum(fragment.view.element_size() for fragment in self.slots)

    @property
    def nbytes(self) -> int:
        return self.element_bytes * self.slots[0].region.numel

    @property
    def total(self) -> int:
        return self.element_bytes * math.prod(self.slots[0].global_shape)

    @property
    def name(self) -> list:
        """Identity of the box, for hashing."""
        first = self.slots[0]
        sizes = [(fragment.slot, fragment.view.element_size()) for fragment in self.slots]
        return [first.name, first.region.offset, first.region.shape, sizes]

    def between(self, start: int, stop: int) -> Iterator[Fragment]:
        """Yields the elements that begin within bytes [start, stop), with the slots of an element adjacent."""
        size, region = self.element_bytes, self.slots[0].region
        first, last = (min(max(-(-position // size), 0), region.numel) for position in (start, stop))
        if (first, last) == (0, region.numel):
            yield from self.slots
            return
        for position, box in boxes_of_range(region.shape, first, last):
            for fragment in self.slots:
                yield dataclasses.replace(
                    fragment,
                    region=box.shifted(region.offset),
                    view=fragment.view[position : position + box.numel],
                    start=fragment.start + position,
                )


@dataclass(frozen=True)
class _Group:
    """Boxes of an operator with the same holders, in an order that is identical on these."""

    operator: str
    slot: str
    alone: bool
    boxes: list[_Box]

    @property
    def nbytes(self) -> int:
        return sum(box.nbytes for box in self.boxes)

    @property
    def copy(self) -> str:
        if self.alone:
            return ""
        return xxhash.xxh3_64_hexdigest(json.dumps([box.name for box in self.boxes]).encode())

    def holding(self, detail: str) -> Holding:
        total = 0 if self.alone else sum(box.total for box in self.boxes)
        return Holding(self.operator, detail, self.slot, self.copy, self.nbytes, total)

    def between(self, start: int, stop: int) -> Iterator[Fragment]:
        for box in self.boxes:
            yield from box.between(start, stop)
            start, stop = start - box.nbytes, stop - box.nbytes


def _groups(fragments: Iterable[Fragment]) -> Iterator[_Group]:
    boxes: dict[tuple, list[Fragment]] = defaultdict(list)
    for fragment in fragments:
        if fragment.first_copy if fragment.sharded else fragment.replica[0] == 0:
            is_whole = not fragment.sharded and fragment.region.shape == fragment.global_shape
            slot = _MODULES if is_module_state(fragment.name) else _SLOTS.get(fragment.slot, _OPTIMIZER)
            kind = fragment.operator, slot, fragment.sharded, is_whole
            boxes[kind, fragment.name, fragment.region].append(fragment)
    groups: dict[tuple, list[_Box]] = defaultdict(list)
    for (kind, _, _), slots in boxes.items():
        groups[kind].append(_Box(sorted(slots, key=lambda f: f.slot)))
    for (operator, slot, sharded, _), found in groups.items():
        yield _Group(operator, slot, sharded, sorted(found, key=lambda box: box.name))


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges adjacent ranges."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and joined[-1][1] == start:
            start, _ = joined.pop()
        joined.append((start, stop))
    return joined


def _numbered(holdings: Sequence[Holding]) -> Iterator[tuple[int | None, Holding]]:
    """Returns the distinct holdings of an operator's slot with their slice numbers, if they are consistent."""
    alone = [holding for holding in holdings if not holding.copy]
    whole = [holding for holding in holdings if holding.copy and holding.nbytes == holding.total]
    slices = [holding for holding in holdings if holding.copy and holding.nbytes != holding.total]
    held, total = sum(holding.nbytes for holding in slices), slices[0].total if slices else 0
    mixed = bool(alone) == bool(whole or slices)
    if mixed or len(whole) > 1 or held != total or any(holding.total != total for holding in slices):
        raise ShardingError(
            f"the parts of the {holdings[0].slot} of {holdings[0].operator} on the ranks do not fit ({len(whole)} "
            f"versions of replicated parts, slices of {held} of {total} bytes). Fix: describe the same model on "
            "every rank of the pipeline stage, and once",
            code="holdings-misfit",
        )
    return itertools.chain(((None, holding) for holding in alone + whole), enumerate(slices))
