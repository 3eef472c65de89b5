"""Who gives whom what, where some workers hold boxes of tensors and others want some: any holder to any holder.

Who holds what and who wants what is the same on all workers, and so is the answer, without a word.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from moc.state.region import Region

MOST = 64 << 20
"""Bytes that are given at once."""


class Box(NamedTuple):
    """A box of a slot of a tensor, which a worker holds or wants.

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
    """A box that a worker gives another: of the ``held``-th that it holds to the ``wanted``-th that the other wants."""

    source: int
    held: int
    target: int
    wanted: int
    region: Region


def transfers(
    held: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]], most: int = MOST
) -> tuple[list[Transfer], list[Box]]:
    """Who gives whom what.

    A worker takes from itself what it holds; else, of those that hold the most of a piece, the one gives it that gives
    the fewest bytes so far.

    Args:
        held: by rank, the boxes that it holds; they may overlap, and where they do, they hold the same.
        wanted: by rank, the boxes that it wants.
        most: bytes of a transfer, no less than an element has.

    Returns:
        Transfers that cover each wanted box, each element once, in an order that :func:`perform` can take; and what of
        the wanted boxes nobody holds.
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
    """In an order in which those between different workers come together, so that they run at the same time."""
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
    """Gives and takes; for all workers with the same transfers.

    Each worker is done with one before it begins with the next: so there is always a first one of all that are not
    done, for which both of its workers are ready, and nobody waits for ever.

    Args:
        found: what :func:`transfers` says.
        held: the boxes that this worker holds, and their values.
        wanted: those that it wants, and what is to be filled.
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
