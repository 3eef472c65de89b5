"""Plans transfers of operators between ranks when their holders change.

All holders of an operator have the same bits, so each part may have a different source.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from moc.elastic.plan import Plan
from moc.errors import UserError
from moc.state.region import Region

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
class Transfer:
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
) -> list[Transfer]:
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
        others = f" and {len(lost_operators) - 1} more operators" if len(lost_operators) > 1 else ""
        raise NoSourceError(
            f"no rank holds {lost_operators[0]}{others}. Fix: load a checkpoint",
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
        Transfer(group.round, source, target, piece)
        for group, sources in zip(groups, _assign_sources(groups, _bytes_by_source(groups)), strict=True)
        for (target, piece), source in zip(group.deliveries, sources, strict=True)
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
        return sum(piece.nbytes for _, piece in self.deliveries)


def _delivery_groups(sources: list[int], targets: list[int], chunks: list[StateTensor]) -> Iterator[_DeliveryGroup]:
    """Yields the deliveries of one operator: each chunk to one target, then to the other targets."""
    chunks_of_target = {target: chunks[place :: len(targets)] for place, target in enumerate(targets)}
    yield _DeliveryGroup(0, sources, [(target, piece) for target, mine in chunks_of_target.items() for piece in mine])
    for forwarder, mine in chunks_of_target.items():
        deliveries = [(target, piece) for target in targets if target != forwarder for piece in mine]
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
            new_shares = water_fill_few([loads[source] for source in group.sources], group.nbytes)
            for source, share in zip(group.sources, new_shares, strict=True):
                loads[source] += share
            shares[number], has_changed = new_shares, has_changed or new_shares != old_shares
        if not has_changed:
            break
    return shares


def water_fill_few(loads: Sequence[int], amount: int) -> list[int]:
    """Returns the result of :func:`moc.elastic.dispatch.water_fill`; faster for few loads."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    count = total = 0
    for index in order:
        if loads[index] * count - total > amount:
            break
        count, total = count + 1, total + loads[index]
    height, remainder = divmod(amount + total, count)
    result = [0] * len(loads)
    for number, index in enumerate(order[:count]):
        result[index] = height - loads[index] + (number < remainder)
    return result


def _assign_sources(groups: Sequence[_DeliveryGroup], shares: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yields the sources of the deliveries of each group: always the one furthest behind its share."""
    unsent = [0] * _num_ranks(groups)
    for group, share in zip(groups, shares, strict=True):
        for source, nbytes in zip(group.sources, share, strict=True):
            unsent[source] += nbytes
        chosen = []
        for _, piece in group.deliveries:
            source = max(group.sources, key=unsent.__getitem__)
            unsent[source] -= piece.nbytes
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
) -> dict[int, list[Transfer]]:
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
    transfers_of_layer: dict[int, list[Transfer]] = {layer: [] for layer in nbytes}
    for transfer in plan_transfers(tensors, before, expert_holders(after), max_bytes):
        transfers_of_layer[layer_of[transfer.chunk.operator]].append(transfer)
    return transfers_of_layer
