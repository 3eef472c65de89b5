"""Transfers boxes of tensors between workers, from any holder to any receiver.

All workers know which worker has and needs each box. So all compute the same transfers without communication.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from moc.state.region import Region

MOST = 64 << 20
"""Maximum bytes of one transfer."""


class Box(NamedTuple):
    """A box of a slot of a tensor that a worker has or needs.

    Attributes:
        name: of the tensor in the unpartitioned model.
        slot: as in :class:`~moc.state.fragments.Fragment`.
        region: the box.
        itemsize: bytes of an element.
    """

    name: str
    slot: str
    region: Region
    itemsize: int


class Transfer(NamedTuple):
    """A region sent from the ``held``-th box that the source has to the ``wanted``-th box that the target needs."""

    source: int
    held: int
    target: int
    wanted: int
    region: Region


def transfers(
    held: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]], most: int = MOST
) -> tuple[list[Transfer], list[Box]]:
    """Computes the transfers from the boxes that each rank has and needs.

    A worker uses its own data first. Otherwise, among the workers with the largest part of a region, the worker that
    sends the fewest bytes so far is the source. Overlapping boxes have the same values. A transfer has at most ``most``
    bytes, or one element.

    Returns:
        Transfers that cover each element of the wanted boxes once, in an order for :func:`perform`; and the parts of
        wanted boxes that no worker has.
    """
    holders: dict[tuple[str, str], list[tuple[int, int, Region]]] = defaultdict(list)
    for rank, boxes in enumerate(held):
        for number, box in enumerate(boxes):
            holders[box.name, box.slot].append((rank, number, box.region))
    given, found, missing = Counter(), [], []
    for target, boxes in enumerate(wanted):
        for number, box in enumerate(boxes):
            left = [*box.region.cut(most // box.itemsize)][::-1]
            while left:
                region, offers = left.pop(), []
                for source, its, whole in holders[box.name, box.slot]:
                    if (common := region.intersect(whole)) is not None:
                        offers.append((source != target, -common.numel, given[source], source, its, common))
                if not offers:
                    missing.append(box._replace(region=region))
                    continue
                away, _, _, source, its, common = min(offers, key=lambda offer: offer[:5])
                given[source] += away * common.numel * box.itemsize
                found.append(Transfer(source, its, target, number, common))
                left.extend(region.without(common))
    return _in_turns(found), missing


def _in_turns(found: Iterable[Transfer]) -> list[Transfer]:
    """Orders transfers so that those between different workers run at the same time."""
    free, turns = Counter(), defaultdict(list)
    for one in found:
        turn = max(free[one.source], free[one.target])
        free[one.source] = free[one.target] = turn + 1
        turns[turn].append(one)
    return [one for turn in sorted(turns) for one in turns[turn]]


def perform(
    found: Iterable[Transfer],
    held: Sequence[tuple[Region, torch.Tensor]],
    wanted: Sequence[tuple[Region, torch.Tensor]],
) -> None:
    """Sends and receives; all workers call it with the same transfers, and with the values of their boxes.

    Each worker finishes one transfer before it starts the next. The first unfinished transfer always has both workers
    ready, so there is no deadlock.
    """
    rank = dist.get_rank()
    for one in found:
        if rank == one.source:
            values = _part(*held[one.held], one.region).contiguous()
            if rank != one.target:
                dist.send(values, one.target)
        if rank == one.target:
            into = _part(*wanted[one.wanted], one.region)
            if rank != one.source:
                values = torch.empty(one.region.shape, dtype=into.dtype, device=into.device)
                dist.recv(values, one.source)
            into.copy_(values)


def _part(region: Region, values: torch.Tensor, part: Region) -> torch.Tensor:
    return values.view(region.shape)[part.slices(region.offset)]
