"""Computes each rank's share of a checkpoint from live tensor chunks by the sharding rules.

    descriptors = describe_replicas(state.fragments(operators, detail), detail)  # per detail that a policy may plan
    # once: all-gather pack_descriptors(descriptors) within the pipeline stage; only its ranks can have replicas
    stage = StageReplicas({rank: unpack_descriptors(text) for rank, text in gathered.items()})
    ranges = plan_shards(stage, {operator: detail, ...}, scheme)     # per plan, without communication
    shard = select_fragments(state.fragments(...), ranges.get(rank, []))

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
from moc.sharding.assignment import SaveItem, ShardingError, ShardingScheme, assign_items, cut_large_items
from moc.state.operators import Detail, is_module_state, regions_of_range

if TYPE_CHECKING:  # imports torch
    from moc.state.operators import Fragment

_OPTIMIZER, _MODULES = "optimizer", "modules"
_SLOTS = {"param": "weights", "grad": "gradients"}
""":class:`SaveItem` slot of each chunk slot, except for module state; all others belong to the optimizer."""


class ReplicaDescriptor(NamedTuple):
    """Part of one operator on one rank, as described to the other ranks.

    An operator has up to one holding for state shared by all tensor-parallel ranks, one for this rank's slices, and one
    for state saved only by this rank.  A router's biases add one more.

    Attributes:
        operator: name of the operator.
        detail: value of the :class:`~moc.state.operators.Detail`.
        slot: as in :class:`~moc.sharding.assignment.SaveItem`.
        copy: identifier, equal on all ranks that hold the same boxes of the same tensors in the same slots.  Empty for
            state that this rank saves regardless of the rules: its slices of ZeRO's optimizer state.
        nbytes: size in bytes.
        total: bytes of the same slots of these tensors in the unpartitioned model; 0 if ``copy`` is empty.
    """

    operator: str
    detail: str
    slot: str
    replica_id: str
    nbytes: int
    total: int


class ByteRange(NamedTuple):
    """Bytes [start, stop) of the holding ``copy`` of an operator: see :class:`ReplicaDescriptor`."""

    operator: str
    replica_id: str
    start: int
    stop: int


def describe_replicas(fragments: Iterable[Fragment], detail: Detail) -> list[ReplicaDescriptor]:
    """Returns this rank's holdings.

    For replicated state, only copies on the first stage that holds it are candidates: embeddings tied across stages are
    saved with the embedding.  For state that ZeRO shards, the first copy is always saved; it is described only because
    it counts as load.  There are at most four holdings per operator, for any number of tensors.
    """
    return [group.descriptor(detail.value) for group in _group_chunks(fragments)]


def pack_descriptors(descriptors: Sequence[ReplicaDescriptor]) -> bytes:
    """Serializes holdings, at about 15 bytes each.

    A rank with 300 operators in two details (DeepSeek-MoE-16B in one stage, with 8 expert-parallel ranks) sends about 9
    kB.  So 1,000 ranks of a stage gather about 9 MB, once per model and layout.
    """
    parts = (
        [holding for holding in descriptors if bool(holding.replica_id) == is_replicated]
        for is_replicated in (True, False)
    )
    replicated, unique = (zlib.compress(json.dumps(part, separators=(",", ":")).encode()) for part in parts)
    return len(replicated).to_bytes(4, "big") + replicated + unique


def unpack_descriptors(text: bytes) -> list[ReplicaDescriptor]:
    """Restores holdings from the bytes of :func:`pack_descriptors`; holdings with copies are first."""
    middle = 4 + int.from_bytes(text[:4], "big")
    return [*_decompress(text[4:middle]), *_decompress(text[middle:])]


@functools.lru_cache(maxsize=64)  # replicas of the same experts describe identical copies
def _decompress(text: bytes) -> tuple[ReplicaDescriptor, ...]:
    return tuple(ReplicaDescriptor(*row) for row in parse(zlib.decompress(text)))


class StageReplicas:
    """Replica descriptors of all ranks of one pipeline stage.

    Args:
        descriptors_by_rank: holdings of every rank of the stage, from :func:`describe_replicas`, all details together.

    Raises:
        ShardingError: the holdings of an operator overlap or are incomplete.
    """

    def __init__(self, descriptors_by_rank: Mapping[int, Sequence[ReplicaDescriptor]]):
        self.ranks = frozenset(descriptors_by_rank)
        ranks: dict[ReplicaDescriptor, list[int]] = defaultdict(list)
        for rank in sorted(descriptors_by_rank):
            for holding in descriptors_by_rank[rank]:
                ranks[holding].append(rank)
        slots: dict[tuple[str, str, str], list[ReplicaDescriptor]] = defaultdict(list)
        for holding in sorted(ranks, key=lambda holding: not holding.replica_id):  # the order of unpack()
            slots[holding.operator, holding.detail, holding.slot].append(holding)
        shared_tuples = {
            holders: holders for holders in map(tuple, ranks.values())
        }  # thousands of operators share a few
        self._items: dict[tuple[str, str], list[SaveItem]] = defaultdict(list)
        self._replica_ids: dict[tuple[str, str, str, int | None], str | None] = {}
        for (operator, detail, slot), descriptors in slots.items():
            for number, holding in _number_slices(descriptors):
                holder_ranks = shared_tuples[tuple(ranks[holding])]
                for holders in [holder_ranks] if holding.replica_id else [(rank,) for rank in holder_ranks]:
                    item = SaveItem(operator, slot, number, 0, holding.nbytes, holders)
                    self._items[operator, detail].append(item)
                self._replica_ids[operator, detail, slot, number] = holding.replica_id or None

    def items(self, plan: Mapping[str, Detail]) -> list[SaveItem]:
        """Returns the uncut save items of a checkpoint, without other stages' operators; identical on every rank."""
        keys = {(operator, detail.value) for operator, detail in plan.items()}
        return [item for key, items in self._items.items() if key in keys for item in items]

    def replica_id(self, item: SaveItem, detail: Detail) -> str | None:
        """Returns the identifier of an item's (or piece's) replicas; None if only one rank can save it."""
        return self._replica_ids[item.operator, detail.value, item.slot, item.slice]


def plan_shards(
    stage: StageReplicas, plan: Mapping[str, Detail], scheme: ShardingScheme, nodes: Sequence[str] = ()
) -> dict[int, list[ByteRange]]:
    """Returns the parts of replicated state that each rank of a stage saves; identical on every rank.

    Operators are not cut, as in MoC's section 4, unless they exceed an even share of their holders
    (:func:`moc.sharding.cut_large_items`).  Operators of other stages are ignored.

    Args:
        stage: holdings of all ranks.
        plan: operators, each at its detail.
        scheme: the rules.
        nodes: by rank, the name of its node; each node then saves the state of its ranks.  Empty to ignore nodes.

    Returns:
        Byte ranges by rank, which together cover every byte of every copy exactly once, on each node that has it.

    Raises:
        ShardingError: as :func:`moc.sharding.assign_items`.
    """
    return _byte_ranges_by_rank(stage, plan, _assign_plan(stage, plan, scheme, nodes))


def plan_storage_shards(
    stage: StageReplicas, plan: Mapping[str, Detail], scheme: ShardingScheme, nodes: Sequence[str]
) -> dict[int, list[ByteRange]]:
    """Returns the part of :func:`plan_shards` for storage: the rules choose one of the ranks that save an item."""
    ranks_by_item: dict[SaveItem, list[int]] = defaultdict(list)
    for item, rank in _assign_plan(stage, plan, scheme, nodes):
        ranks_by_item[dataclasses.replace(item, holders=())].append(rank)
    items = [dataclasses.replace(item, holders=tuple(sorted(ranks))) for item, ranks in ranks_by_item.items()]
    return _byte_ranges_by_rank(stage, plan, zip(items, assign_items(items, scheme), strict=True))


def planned_bytes_by_rank(
    stage: StageReplicas, plan: Mapping[str, Detail], scheme: ShardingScheme, nodes: Sequence[str] = ()
) -> Counter[int]:
    """Returns the bytes of each rank of a stage under a plan (:func:`plan_shards`), without ranks that save nothing."""
    load: Counter[int] = Counter()
    for item, rank in _assign_plan(stage, plan, scheme, nodes):
        load[rank] += item.nbytes
    return load


def replicated_operators(
    stage: StageReplicas, plan: Mapping[str, Detail], nodes: Sequence[str]
) -> dict[tuple[str, ...], dict[str, int]]:
    """Returns the operators of a stage with identical copies on several nodes, by these nodes, with bytes per copy.

    ``nodes`` names the node of each rank.
    """
    bytes_by_operator: dict[tuple[str, ...], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for item in stage.items(plan):
        if len(of := tuple(dict.fromkeys(nodes[rank] for rank in item.holders))) > 1:
            bytes_by_operator[of][item.operator] += item.nbytes
    return {holder_nodes: dict(operators) for holder_nodes, operators in bytes_by_operator.items()}


def _assign_plan(
    stage: StageReplicas, plan: Mapping[str, Detail], scheme: ShardingScheme, nodes: Sequence[str]
) -> list[tuple[SaveItem, int]]:
    items = [
        part for item in cut_large_items(stage.items(plan)) for part in _split_by_node(item, nodes)
    ]  # identical on all nodes
    return list(zip(items, assign_items(items, scheme), strict=True))


def _split_by_node(item: SaveItem, nodes: Sequence[str]) -> list[SaveItem]:
    """Returns the item once for each node that holds it."""
    if not nodes or len(item.holders) == 1:
        return [item]
    ranks_by_node: dict[str, list[int]] = defaultdict(list)
    for rank in item.holders:
        ranks_by_node[nodes[rank]].append(rank)
    return (
        [item]
        if len(ranks_by_node) == 1
        else [dataclasses.replace(item, holders=tuple(ranks)) for ranks in ranks_by_node.values()]
    )


def _byte_ranges_by_rank(
    stage: StageReplicas, plan: Mapping[str, Detail], assigned: Iterable[tuple[SaveItem, int]]
) -> dict[int, list[ByteRange]]:
    result: dict[int, list[ByteRange]] = defaultdict(list)
    for item, rank in assigned:
        replica_id = stage.replica_id(item, plan[item.operator])
        if replica_id is not None:
            result[rank].append(ByteRange(item.operator, replica_id, item.start, item.stop))
    return dict(result)


def select_fragments(
    fragments: Iterable[Fragment], byte_ranges: Sequence[ByteRange], merges_adjacent: bool = True
) -> list[Fragment]:
    """Returns the tensor chunks that this rank saves, as views of live memory, cut where an operator was cut.

    Args:
        fragments: tensor chunks of this rank.
        byte_ranges: this rank's entry of :func:`plan_shards`; its slices of ZeRO's optimizer state are also saved.
        merges_adjacent: merge adjacent parts.  Otherwise all nodes with identical parts save the same boxes.

    Raises:
        ShardingError: a part is not among the fragments.
    """
    spans: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for part in byte_ranges:
        spans[part.operator, part.replica_id].append((part.start, part.stop))
    result = []
    for group in _group_chunks(fragments):
        ranges = [(0, group.nbytes)] if group.is_unique else spans.pop((group.operator, group.replica_id), [])
        for start, stop in _merge_adjacent(ranges) if merges_adjacent else sorted(ranges):
            result.extend(group.select_bytes(start, stop))
    if spans:
        operator = next(iter(spans))[0]
        raise ShardingError(
            f"this rank is to save a part of {operator} which is not among its fragments: model, layout or detail are "
            "not the described ones. Fix: describe and gather them again",
            code="holdings-misfit",
        )
    return result


@dataclass(frozen=True)
class _ChunkSlots:
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
    def identity(self) -> list:
        """Identity of the box, for hashing."""
        first = self.slots[0]
        sizes = [(fragment.slot, fragment.view.element_size()) for fragment in self.slots]
        return [first.name, first.region.offset, first.region.shape, sizes]

    def select_bytes(self, start: int, stop: int) -> Iterator[Fragment]:
        """Yields the elements that begin within bytes [start, stop), with the slots of an element adjacent."""
        size, region = self.element_bytes, self.slots[0].region
        first, last = (min(max(-(-position // size), 0), region.numel) for position in (start, stop))
        if (first, last) == (0, region.numel):
            yield from self.slots
            return
        for position, chunk_region in regions_of_range(region.shape, first, last):
            for fragment in self.slots:
                yield dataclasses.replace(
                    fragment,
                    region=chunk_region.shifted(region.offset),
                    view=fragment.view[position : position + chunk_region.numel],
                    start=fragment.start + position,
                )


@dataclass(frozen=True)
class _ChunkGroup:
    """Boxes of an operator with the same holders, in an order that is identical on these."""

    operator: str
    slot: str
    is_unique: bool
    chunks: list[_ChunkSlots]

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def replica_id(self) -> str:
        if self.is_unique:
            return ""
        return xxhash.xxh3_64_hexdigest(json.dumps([chunk.identity for chunk in self.chunks]).encode())

    def descriptor(self, detail: str) -> ReplicaDescriptor:
        total = 0 if self.is_unique else sum(chunk.total for chunk in self.chunks)
        return ReplicaDescriptor(self.operator, detail, self.slot, self.replica_id, self.nbytes, total)

    def select_bytes(self, start: int, stop: int) -> Iterator[Fragment]:
        for chunk in self.chunks:
            yield from chunk.select_bytes(start, stop)
            start, stop = start - chunk.nbytes, stop - chunk.nbytes


def _group_chunks(fragments: Iterable[Fragment]) -> Iterator[_ChunkGroup]:
    chunks: dict[tuple, list[Fragment]] = defaultdict(list)
    for fragment in fragments:
        if fragment.first_copy if fragment.sharded else fragment.replica[0] == 0:
            is_complete = not fragment.sharded and fragment.region.shape == fragment.global_shape
            slot = _MODULES if is_module_state(fragment.name) else _SLOTS.get(fragment.slot, _OPTIMIZER)
            kind = fragment.operator, slot, fragment.sharded, is_complete
            chunks[kind, fragment.name, fragment.region].append(fragment)
    groups: dict[tuple, list[_ChunkSlots]] = defaultdict(list)
    for (kind, _, _), slots in chunks.items():
        groups[kind].append(_ChunkSlots(sorted(slots, key=lambda f: f.slot)))
    for (operator, slot, sharded, _), group_chunks in groups.items():
        yield _ChunkGroup(operator, slot, sharded, sorted(group_chunks, key=lambda chunk: chunk.identity))


def _merge_adjacent(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges adjacent ranges."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and merged[-1][1] == start:
            start, _ = merged.pop()
        merged.append((start, stop))
    return merged


def _number_slices(descriptors: Sequence[ReplicaDescriptor]) -> Iterator[tuple[int | None, ReplicaDescriptor]]:
    """Returns the distinct holdings of an operator's slot with their slice numbers, if they are consistent."""
    unique = [holding for holding in descriptors if not holding.replica_id]
    replicated = [holding for holding in descriptors if holding.replica_id and holding.nbytes == holding.total]
    slices = [holding for holding in descriptors if holding.replica_id and holding.nbytes != holding.total]
    slice_bytes, total = sum(holding.nbytes for holding in slices), slices[0].total if slices else 0
    is_inconsistent = bool(unique) == bool(replicated or slices)
    if (
        is_inconsistent
        or len(replicated) > 1
        or slice_bytes != total
        or any(holding.total != total for holding in slices)
    ):
        raise ShardingError(
            f"the parts of the {descriptors[0].slot} of {descriptors[0].operator} on the ranks do not fit "
            f"({len(replicated)} "
            f"versions of replicated parts, slices of {slice_bytes} of {total} bytes). Fix: describe the same model on "
            "every rank of the pipeline stage, and once",
            code="holdings-misfit",
        )
    return itertools.chain(((None, holding) for holding in unique + replicated), enumerate(slices))
