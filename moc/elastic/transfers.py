"""Plans transfers of operators and optimizer shards between ranks when their holders change.

All holders of an operator have the same bits, so each part may have a different source.

Assigns sharded dense optimizer state to ranks so that it survives lost nodes. Parameters are cut into *blocks*. Each
has an *owner*, and *shadows* on other nodes that repeat the owner's updates with the same reduced gradients, and so
have the same bits. Section 5 covers only experts; with ZeRO-1, one lost node would end every run. With f holders of
each block, fewer than f simultaneous losses lose none. Blocks are the same for any number of ranks, so all holders
compute identical updates, and state moves block by block.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from moc.elastic import ElasticError
from moc.elastic.dispatch import water_fill
from moc.elastic.plan import Plan
from moc.errors import UserError
from moc.state.operators import Region

MAX_CHUNK_BYTES = 64 << 20
"""Maximum bytes of a chunk; limits staging memory, and the length of a transfer that a loss interrupts."""

MIN_CHUNKS = 16
"""Minimum number of chunks of the largest expert: several ranks receive parts of it, and forward them."""


@dataclass(frozen=True)
class StateTensor:
    """One state tensor of an operator, or a chunk of it.

    Attributes:
        operator: name of the operator, such as ``layers.N.expert.E``.
        name: name in the unpartitioned model.
        state_key: optimizer-state key: ``master``, ``exp_avg``, ...
        region: chunk bounds that the holders have.
        itemsize: bytes of an element.
    """

    operator: str
    name: str
    state_key: str
    region: Region
    itemsize: int

    @cached_property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.region.numel * self.itemsize


@dataclass(frozen=True)
class ChunkTransfer:
    """A chunk that one rank sends to another; ranks are numbered in the new world.

    Attributes:
        round: 0, or 1 if the source may have received the chunk in round 0.
    """

    round: int
    source: int
    target: int
    chunk: StateTensor


_SWEEPS = 4  # further sweeps change little
_Delivery = tuple[int, StateTensor]  # target and chunk


class NoSourceError(UserError, ValueError):
    """An operator is needed, but held by no rank: it must be loaded from a checkpoint."""

    code = "state-without-source"


def plan_transfers(
    tensors: Iterable[StateTensor],
    before: Mapping[str, Collection[int]],
    after: Mapping[str, Collection[int]],
    max_bytes: int = MAX_CHUNK_BYTES,
) -> list[ChunkTransfer]:
    """Returns the transfers that bring each operator to its new holders.

    If an operator has several new holders, its chunks are distributed among them in round 0. They forward the chunks to
    each other in round 1, so they do not wait for a few original holders. Bytes sent are balanced as the dispatcher
    balances tokens. The order of the chunks determines their sources.

    Args:
        tensors: state of all operators to consider.
        before: current holders by operator.
        after: future holders by operator.
        max_bytes: maximum bytes of a chunk.

    Returns:
        The same on every rank, sorted by round; senders and receivers may post the transfers of a round in this order.

    Raises:
        NoSourceError: an operator is needed, but held by no rank.
    """
    tensors_of: dict[str, list[StateTensor]] = {}
    for tensor in tensors:
        tensors_of.setdefault(tensor.operator, []).append(tensor)
    receivers = {operator: sorted({*after.get(operator, ())} - {*before.get(operator, ())}) for operator in tensors_of}
    moved_operators = [operator for operator in tensors_of if receivers[operator]]
    if lost_operators := [operator for operator in moved_operators if not before.get(operator)]:
        suffix = f" and {len(lost_operators) - 1} more operators" if len(lost_operators) > 1 else ""
        raise NoSourceError(
            f"no rank holds {lost_operators[0]}{suffix}. Fix: load a checkpoint",
        )
    cut = functools.cache(lambda region, count: [*region.cut(count)])  # cached, since most tensors have equal shapes
    groups: list[_DeliveryGroup] = []
    for operator_name in moved_operators:
        chunks = [
            StateTensor(operator_name, tensor.name, tensor.state_key, region, tensor.itemsize)
            for tensor in tensors_of[operator_name]
            for region in cut(tensor.region, max(1, max_bytes // tensor.itemsize))
        ]
        groups += _delivery_groups(sorted(before[operator_name]), receivers[operator_name], chunks)
    planned = [
        ChunkTransfer(group.round, source, target, chunk)
        for group, sources in zip(groups, _assign_sources(groups, _bytes_by_source(groups)), strict=True)
        for (target, chunk), source in zip(group.deliveries, sources, strict=True)
    ]
    return sorted(planned, key=lambda transfer: transfer.round)


@dataclass(frozen=True)
class _DeliveryGroup:
    """Deliveries with the same possible sources."""

    round: int
    sources: list[int]
    deliveries: list[_Delivery]

    @cached_property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for _, chunk in self.deliveries)


def _delivery_groups(sources: list[int], targets: list[int], chunks: list[StateTensor]) -> Iterator[_DeliveryGroup]:
    """Yields the deliveries of one operator: each chunk to one target, then to the other targets."""
    chunks_of_target = {target: chunks[position :: len(targets)] for position, target in enumerate(targets)}
    yield _DeliveryGroup(
        0, sources, [(target, chunk) for target, target_chunks in chunks_of_target.items() for chunk in target_chunks]
    )
    for forwarder, target_chunks in chunks_of_target.items():
        deliveries = [(target, chunk) for target in targets if target != forwarder for chunk in target_chunks]
        if deliveries:
            yield _DeliveryGroup(1, [*sources, forwarder], deliveries)


def _bytes_by_source(groups: Sequence[_DeliveryGroup]) -> list[list[int]]:
    """Returns the bytes that each source of each group sends; the least loaded sources are filled first.

    Each step redistributes one group among its sources, given their loads from the other groups. This lowers the sum of
    squares, and so leads to the most even shares.
    """
    loads = [0] * _num_ranks(groups)
    shares = [[0] * len(group.sources) for group in groups]
    order = sorted(range(len(groups)), key=lambda number: len(groups[number].sources))
    for _ in range(_SWEEPS):
        has_changed = False
        for number in order:
            group, old_shares = groups[number], shares[number]
            for source, share in zip(group.sources, old_shares, strict=True):
                loads[source] -= share
            new_shares = water_fill([loads[source] for source in group.sources], group.nbytes)
            for source, share in zip(group.sources, new_shares, strict=True):
                loads[source] += share
            shares[number], has_changed = new_shares, has_changed or new_shares != old_shares
        if not has_changed:
            break
    return shares


def _assign_sources(groups: Sequence[_DeliveryGroup], shares: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yields the sources of the deliveries of each group: always the one furthest behind its share."""
    unsent = [0] * _num_ranks(groups)
    for group, share in zip(groups, shares, strict=True):
        for source, nbytes in zip(group.sources, share, strict=True):
            unsent[source] += nbytes
        chosen = []
        for _, chunk in group.deliveries:
            source = max(group.sources, key=unsent.__getitem__)
            unsent[source] -= chunk.nbytes
            chosen.append(source)
        yield chosen


def _num_ranks(groups: Sequence[_DeliveryGroup]) -> int:
    return 1 + max((max(group.sources) for group in groups), default=0)


def expert_operator(layer: int, expert: int) -> str:
    """Returns the name of an expert's operator."""
    return f"layers.{layer}.expert.{expert}"


def expert_holders(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Returns the ranks that hold each expert, by operator name."""
    return {
        expert_operator(layer, expert): plan.holders(layer, expert)
        for layer, expert in itertools.product(sorted(plan.tables), range(plan.experts))
    }


def count_new_replicas(before: Plan, after: Plan) -> int:
    """Returns the number of replicas that ranks hold by ``after`` but not by ``before``, with the same ranks."""
    return sum(int((after.replica_matrix(layer) > before.replica_matrix(layer)).sum()) for layer in after.tables)


def plan_expert_transfers(
    before: Mapping[str, Collection[int]], after: Plan, nbytes: Mapping[int, int]
) -> dict[int, list[ChunkTransfer]]:
    """Returns the transfers that bring experts to their holders by a plan, balanced over all layers.

    Args:
        before: ranks that hold each expert now, in the form of :func:`expert_holders`.
        after: the plan.
        nbytes: by layer, bytes of the state of one expert, which is one range of bytes.

    Returns:
        Transfers by layer, in the form of :func:`plan_transfers`; layers can be moved one by one.

    Raises:
        NoSourceError: an expert is needed, but held by no rank.
    """
    layer_of = {expert_operator(layer, expert): layer for layer in nbytes for expert in range(after.experts)}
    tensors = [StateTensor(name, "", "", Region((0,), (nbytes[layer],)), 1) for name, layer in layer_of.items()]
    max_bytes = min(MAX_CHUNK_BYTES, max(1, -(-max(nbytes.values(), default=1) // MIN_CHUNKS)))
    transfers_of_layer: dict[int, list[ChunkTransfer]] = {layer: [] for layer in nbytes}
    for transfer in plan_transfers(tensors, before, expert_holders(after), max_bytes):
        transfers_of_layer[layer_of[transfer.chunk.operator]].append(transfer)
    return transfers_of_layer


_MIN_BLOCKS, _MIN_ELEMENTS, _MAX_ELEMENTS = 1024, 1 << 10, 1 << 20

Holders = tuple[tuple[int, ...], ...]
"""By block, the ranks that hold it, the owner first."""


class Block(NamedTuple):
    """A range of a flattened tensor.

    Attributes:
        tensor: index of the tensor.
        start: first element.
        stop: index after the last element.
    """

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def cut_into_blocks(sizes: Sequence[int]) -> tuple[Block, ...]:
    """Returns the blocks of tensors with these numbers of elements, in order.

    A block has at most 1/1024 of all elements, so that shards are balanced for some hundred ranks. But it has at least
    1024 elements, except at the end of a tensor, and at most 2**20.
    """
    max_elements = min(max(_MIN_ELEMENTS, -(-sum(sizes) // _MIN_BLOCKS)), _MAX_ELEMENTS)
    return tuple(
        Block(tensor, start, min(start + max_elements, size))
        for tensor, size in enumerate(sizes)
        for start in range(0, size, max_elements)
    )


@dataclass(frozen=True)
class ShardAssignment:
    """Assignment of all blocks to ranks.

    Attributes:
        members: numbers of the nodes, in the order of ranks.
        ranks: ranks of each node.
        holders: holders of each block.
    """

    members: tuple[int, ...]
    ranks: int
    holders: Holders

    def restricted_to(self, members: Sequence[int], has_state: Sequence[bool]) -> ShardAssignment:
        """Returns this assignment for other members, before any transfer: a shadow replaces a lost owner.

        Args:
            members: active nodes.
            has_state: for each of their ranks, whether it still has its blocks of this assignment (otherwise none).
        """
        index_of = {member: position for position, member in enumerate(members)}
        new_rank: dict[int, int] = {}
        for index, member in enumerate(self.members):
            for local in range(self.ranks) if member in index_of else ():
                rank = index_of[member] * self.ranks + local
                if has_state[rank]:
                    new_rank[index * self.ranks + local] = rank
        return ShardAssignment(
            tuple(members),
            self.ranks,
            tuple(
                tuple(new_rank[rank] for rank in ranks_of_block if rank in new_rank) for ranks_of_block in self.holders
            ),
        )

    @property
    def lost_blocks(self) -> tuple[int, ...]:
        """Blocks without a holder."""
        return tuple(block for block, ranks_of_block in enumerate(self.holders) if not ranks_of_block)

    def blocks_of_rank(self, rank: int) -> dict[int, int]:
        """Returns the blocks that a rank holds, with its index among the holders: 0 for the owner."""
        return {
            block: ranks_of_block.index(rank)
            for block, ranks_of_block in enumerate(self.holders)
            if rank in ranks_of_block
        }

    @cached_property
    def digest(self) -> str:
        """xxh3-128 in hex; equal assignments have equal digests."""
        return xxhash.xxh3_128_hexdigest(json.dumps(self.to_json()).encode())

    def to_json(self) -> dict[str, Any]:
        """Returns a dict for ``json.dumps`` and :meth:`from_json`."""
        return {
            "members": list(self.members),
            "ranks": self.ranks,
            "holders": [list(ranks_of_block) for ranks_of_block in self.holders],
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ShardAssignment:
        """Returns the assignment of a :meth:`to_json` result; raises ValueError if it is invalid."""
        try:
            return cls(tuple(document["members"]), int(document["ranks"]), tuple(map(tuple, document["holders"])))
        except (KeyError, TypeError) as error:
            raise ElasticError(
                f"the assignment of optimizer state is invalid: {error!r}. Fix: load a complete checkpoint",
                code="expert-plan-invalid",
            ) from None


def assign_blocks(sizes: Sequence[int], members: Sequence[int], ranks: int, holders_per_block: int) -> ShardAssignment:
    """Assigns blocks with these numbers of elements to nodes; pure, so that ranks agree without communication.

    Ranks own consecutive blocks, balanced to within a block. Shadows of a rank have the same local rank on the next
    nodes; with fewer nodes than ``holders_per_block``, other ranks of these nodes follow.
    """
    nodes, size = len(members), len(members) * ranks
    ends = [*itertools.accumulate(sizes)]
    total = ends[-1] if ends else 0
    bounds = [total * rank / size for rank in range(1, size)]
    holders_of_rank = [
        tuple(
            ((rank // ranks + node) % nodes) * ranks + (rank + local) % ranks
            for local in range(ranks)
            for node in range(nodes)
        )[:holders_per_block]
        for rank in range(size)
    ]
    middles = [end - numel / 2 for end, numel in zip(ends, sizes, strict=True)]
    holders = tuple(holders_of_rank[bisect.bisect_right(bounds, middle)] for middle in middles)
    return ShardAssignment(tuple(members), ranks, holders)
