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

PIECE = 64 << 20
"""Maximum bytes of a chunk; limits staging memory, and the length of a transfer that a loss interrupts."""

PARTS = 16
"""Minimum number of chunks of the largest expert: several ranks receive parts of it, and forward them."""


@dataclass(frozen=True)
class Tensor:
    """One state tensor of an operator, or a chunk of it.

    Attributes:
        operator: name of the operator, such as ``layers.N.expert.E``.
        name: name in the unpartitioned model.
        slot: optimizer-state key: ``master``, ``exp_avg``, ...
        region: chunk bounds that the holders have.
        itemsize: bytes of an element.
    """

    operator: str
    name: str
    slot: str
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
    piece: Tensor


_SWEEPS = 4  # further sweeps change little
_Delivery = tuple[int, Tensor]  # target and chunk


class NoSourceError(UserError, ValueError):
    """An operator is needed, but held by no rank: it must be loaded from a checkpoint."""

    code = "state-without-source"


def transfers(
    tensors: Iterable[Tensor],
    before: Mapping[str, Collection[int]],
    after: Mapping[str, Collection[int]],
    most: int = PIECE,
) -> list[Transfer]:
    """Returns the transfers that bring each operator to its new holders.

    If an operator has several new holders, its chunks are distributed among them in round 0. They forward the chunks to
    each other in round 1, so they do not wait for a few original holders. Bytes sent are balanced as the dispatcher
    balances tokens. The order of the chunks determines their sources.

    Args:
        tensors: state of all operators to consider.
        before: current holders by operator.
        after: future holders by operator.
        most: maximum bytes of a chunk.

    Returns:
        The same on every rank, sorted by round; senders and receivers may post the transfers of a round in this order.

    Raises:
        NoSourceError: an operator is needed, but held by no rank.
    """
    whole: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        whole.setdefault(tensor.operator, []).append(tensor)
    needed = {operator: sorted({*after.get(operator, ())} - {*before.get(operator, ())}) for operator in whole}
    moved = [operator for operator in whole if needed[operator]]
    if lost := [operator for operator in moved if not before.get(operator)]:
        raise NoSourceError(
            f"no rank holds {lost[0]}{f' and {len(lost) - 1} more operators' if lost[1:] else ''}. Fix: load a "
            "checkpoint",
        )
    cut = functools.cache(lambda region, count: [*region.cut(count)])  # cached, since most tensors have equal shapes
    groups: list[_Group] = []
    for one in moved:
        pieces = [
            Tensor(one, tensor.name, tensor.slot, region, tensor.itemsize)
            for tensor in whole[one]
            for region in cut(tensor.region, max(1, most // tensor.itemsize))
        ]
        groups += _groups(sorted(before[one]), needed[one], pieces)
    result = [
        Transfer(group.round, source, target, piece)
        for group, sources in zip(groups, _sources(groups, _shares(groups)), strict=True)
        for (target, piece), source in zip(group.deliveries, sources, strict=True)
    ]
    return sorted(result, key=lambda transfer: transfer.round)


@dataclass(frozen=True)
class _Group:
    """Deliveries with the same possible sources."""

    round: int
    sources: list[int]
    deliveries: list[_Delivery]

    @cached_property
    def nbytes(self) -> int:
        return sum(piece.nbytes for _, piece in self.deliveries)


def _groups(sources: list[int], targets: list[int], pieces: list[Tensor]) -> Iterator[_Group]:
    """Yields the deliveries of one operator: each chunk to one target, then to the other targets."""
    dealt = {target: pieces[place :: len(targets)] for place, target in enumerate(targets)}
    yield _Group(0, sources, [(target, piece) for target, mine in dealt.items() for piece in mine])
    for holder, mine in dealt.items():
        deliveries = [(target, piece) for target in targets if target != holder for piece in mine]
        if deliveries:
            yield _Group(1, [*sources, holder], deliveries)


def _shares(groups: Sequence[_Group]) -> list[list[int]]:
    """Returns the bytes that each source of each group sends; the least loaded sources are filled first.

    Each step redistributes one group among its sources, given their loads from the other groups. This lowers the sum of
    squares, and so leads to the most even shares.
    """
    loads = [0] * _ranks(groups)
    shares = [[0] * len(group.sources) for group in groups]
    order = sorted(range(len(groups)), key=lambda number: len(groups[number].sources))
    for _ in range(_SWEEPS):
        changed = False
        for number in order:
            group, before = groups[number], shares[number]
            for source, share in zip(group.sources, before, strict=True):
                loads[source] -= share
            now = levelled([loads[source] for source in group.sources], group.nbytes)
            for source, share in zip(group.sources, now, strict=True):
                loads[source] += share
            shares[number], changed = now, changed or now != before
        if not changed:
            break
    return shares


def levelled(loads: Sequence[int], amount: int) -> list[int]:
    """Returns the result of :func:`moc.elastic.dispatch.filled_up`; faster for few loads."""
    order = sorted(range(len(loads)), key=loads.__getitem__)
    count = total = 0
    for place in order:
        if loads[place] * count - total > amount:
            break
        count, total = count + 1, total + loads[place]
    height, more = divmod(amount + total, count)
    result = [0] * len(loads)
    for number, place in enumerate(order[:count]):
        result[place] = height - loads[place] + (number < more)
    return result


def _sources(groups: Sequence[_Group], shares: Sequence[list[int]]) -> Iterator[list[int]]:
    """Yields the sources of the deliveries of each group: always the one furthest behind its share."""
    behind = [0] * _ranks(groups)
    for group, share in zip(groups, shares, strict=True):
        for source, nbytes in zip(group.sources, share, strict=True):
            behind[source] += nbytes
        chosen = []
        for _, piece in group.deliveries:
            source = max(group.sources, key=behind.__getitem__)
            behind[source] -= piece.nbytes
            chosen.append(source)
        yield chosen


def _ranks(groups: Sequence[_Group]) -> int:
    return 1 + max((max(group.sources) for group in groups), default=0)


def expert_operator(layer: int, expert: int) -> str:
    """Returns the name of an expert's operator."""
    return f"layers.{layer}.expert.{expert}"


def experts_held(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Returns the ranks that hold each expert, by operator name."""
    return {
        expert_operator(layer, expert): plan.holders(layer, expert)
        for layer, expert in itertools.product(sorted(plan.tables), range(plan.experts))
    }


def copies(before: Plan, after: Plan) -> int:
    """Returns the number of replicas that ranks hold by ``after`` but not by ``before``, with the same ranks."""
    return sum(int((after.held(layer) > before.held(layer)).sum()) for layer in after.tables)


def expert_transfers(
    before: Mapping[str, Collection[int]], after: Plan, nbytes: Mapping[int, int]
) -> dict[int, list[Transfer]]:
    """Returns the transfers that bring experts to their holders by a plan, balanced over all layers.

    Args:
        before: ranks that hold each expert now, in the form of :func:`experts_held`.
        after: the plan.
        nbytes: by layer, bytes of the state of one expert, which is one range of bytes.

    Returns:
        Transfers by layer, in the form of :func:`transfers`; layers can be moved one by one.

    Raises:
        NoSourceError: an expert is needed, but held by no rank.
    """
    layer_of = {expert_operator(layer, expert): layer for layer in nbytes for expert in range(after.experts)}
    tensors = [Tensor(name, "", "", Region((0,), (nbytes[layer],)), 1) for name, layer in layer_of.items()]
    most = min(PIECE, max(1, -(-max(nbytes.values(), default=1) // PARTS)))
    found: dict[int, list[Transfer]] = {layer: [] for layer in nbytes}
    for one in transfers(tensors, before, experts_held(after), most):
        found[layer_of[one.piece.operator]].append(one)
    return found
