"""What is sent from whom to whom, when ranks hold other operators than before; sources are alike in bytes.

Holders of an operator have the same bits, so that each part of it may come from another one.
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
"""Bytes of the largest piece: staging memory is as large, and a loss ends no longer transfer."""

PARTS = 16
"""Pieces of an expert at least, so that what one rank holds goes to several, which pass it on."""


@dataclass(frozen=True)
class Tensor:
    """One slot of a tensor of an operator.

    Attributes:
        operator: ``layers.N.expert.E``, or any other.
        name: in the unpartitioned model.
        slot: ``master``, ``exp_avg``, ...
        region: the box of it that holders have.
        itemsize: bytes of an element.
    """

    operator: str
    name: str
    slot: str
    region: Region
    itemsize: int

    @cached_property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.region.numel * self.itemsize


@dataclass(frozen=True)
class Transfer:
    """A piece of a tensor that one rank sends to another; ranks are those of the new world.

    Attributes:
        round: 0, or 1 if the source may have got the piece in round 0.
    """

    round: int
    source: int
    target: int
    piece: Tensor


_SWEEPS = 4  # after which a further one changes little
_Delivery = tuple[int, Tensor]  # target and piece


class NoSourceError(UserError, ValueError):
    """Nobody holds an operator that somebody needs: it must come from a checkpoint."""

    code = "state-without-source"


def transfers(
    tensors: Iterable[Tensor],
    before: Mapping[str, Collection[int]],
    after: Mapping[str, Collection[int]],
    most: int = PIECE,
) -> list[Transfer]:
    """The transfers that bring each operator to those that shall hold it and do not yet.

    Of an operator with several new holders, the pieces are dealt out among them in round 0, and they pass them on to
    one another in round 1, so that what only few held does not wait for those.  Who sends how much is levelled, as the
    dispatcher does with tokens; which piece comes from whom follows from their order.

    Args:
        tensors: of all operators that are told of.
        before: ranks that hold an operator.
        after: ranks that shall hold it.
        most: bytes of a piece.

    Returns:
        The same on every rank, round by round; both sides may post those of a round in this order.

    Raises:
        NoSourceError: an operator is needed, and held by no rank.
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
    cut = functools.cache(lambda region, count: [*region.cut(count)])  # most tensors are alike
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
    """Deliveries that any of the same ranks may make."""

    round: int
    sources: list[int]
    deliveries: list[_Delivery]

    @cached_property
    def nbytes(self) -> int:
        return sum(piece.nbytes for _, piece in self.deliveries)


def _groups(sources: list[int], targets: list[int], pieces: list[Tensor]) -> Iterator[_Group]:
    """Of one operator: each piece once, to one target; then each target's, to the others."""
    dealt = {target: pieces[place :: len(targets)] for place, target in enumerate(targets)}
    yield _Group(0, sources, [(target, piece) for target, mine in dealt.items() for piece in mine])
    for holder, mine in dealt.items():
        deliveries = [(target, piece) for target in targets if target != holder for piece in mine]
        if deliveries:
            yield _Group(1, [*sources, holder], deliveries)


def _shares(groups: Sequence[_Group]) -> list[list[int]]:
    """Bytes that each source of each group sends: those that send least are filled up, until all are level.

    One group after the other is shared out anew among its sources, on top of what they send of the others.  That lowers
    the sum of squares at each step, and so leads to the most even shares there are.
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
    """As :func:`moc.elastic.dispatch.filled_up`; faster where they are few."""
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
    """Who makes each delivery of each group: of its sources, the one that is most behind its shares so far."""
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
    """Name of an expert's operator."""
    return f"layers.{layer}.expert.{expert}"


def experts_held(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Ranks that hold each expert, by the name of its operator."""
    return {
        expert_operator(layer, expert): plan.holders(layer, expert)
        for layer, expert in itertools.product(sorted(plan.tables), range(plan.experts))
    }


def copies(before: Plan, after: Plan) -> int:
    """Replicas of experts that ranks hold by a plan, and not by another one of the same ranks."""
    return sum(int((after.held(layer) > before.held(layer)).sum()) for layer in after.tables)


def expert_transfers(
    before: Mapping[str, Collection[int]], after: Plan, nbytes: Mapping[int, int]
) -> dict[int, list[Transfer]]:
    """The transfers that bring experts to where a plan has them, levelled over all layers.

    Args:
        before: ranks that hold each expert now, as :func:`experts_held` tells it.
        after: the plan.
        nbytes: by layer, bytes of the state of one of its experts, which is one range of bytes.

    Returns:
        By layer, so that layers can be moved one by one; each as :func:`transfers` returns it.

    Raises:
        NoSourceError: an expert is needed, and held by no rank.
    """
    layer_of = {expert_operator(layer, expert): layer for layer in nbytes for expert in range(after.experts)}
    tensors = [Tensor(name, "", "", Region((0,), (nbytes[layer],)), 1) for name, layer in layer_of.items()]
    most = min(PIECE, max(1, -(-max(nbytes.values(), default=1) // PARTS)))
    found: dict[int, list[Transfer]] = {layer: [] for layer in nbytes}
    for one in transfers(tensors, before, experts_held(after), most):
        found[layer_of[one.piece.operator]].append(one)
    return found


def experts_left(previous: Plan, members: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Ranks among those of ``members`` that hold each expert by the previous plan; none, where it is lost."""
    number = {member: index for index, member in enumerate(members)}
    now = {
        index * previous.ranks + local: number[member] * previous.ranks + local
        for index, member in enumerate(previous.members)
        if member in number
        for local in range(previous.ranks)
    }
    return {
        operator: tuple(sorted(now[rank] for rank in ranks if rank in now))
        for operator, ranks in experts_held(previous).items()
    }
