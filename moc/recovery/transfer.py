"""Transfers boxes of tensors between workers: any holder to any receiver.

All workers know who holds and who wants which box, so all compute the same transfers without communication.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from moc.state.region import Region

MOST = 64 << 20
"""Bytes of one transfer, at most."""


class Box(NamedTuple):
    """A box of a slot of a tensor, held or wanted by a worker.

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
    """A region sent from the ``held``-th box that the source holds to the ``wanted``-th box that the target wants."""

    source: int
    held: int
    target: int
    wanted: int
    region: Region


def transfers(
    held: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]], most: int = MOST
) -> tuple[list[Transfer], list[Box]]:
    """Computes who sends what to whom, from the boxes that each rank holds and wants.

    A worker takes from itself what it holds; otherwise, among the workers that hold the most of a piece, the one sends
    that sends the fewest bytes so far.  Overlapping boxes hold the same values.  A transfer has at most ``most``
    bytes, or one element.

    Returns:
        Transfers that cover each element of the wanted boxes once, in an order for :func:`perform`; and the parts of
        wanted boxes that nobody holds.
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

    Each worker finishes one transfer before it starts the next: the first unfinished one always has both of its workers
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
