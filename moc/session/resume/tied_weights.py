"""Weights that several pipeline stages hold alike: embeddings that are tied to the output layer.

The first of these stages saves them, so no other node has them in its memory.  When they are loaded, it gives them to
the others, whatever the layout: ZeRO cuts the same weights elsewhere in each stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from moc.runtime.agreement import gather
from moc.state.fragments import Fragment
from moc.state.interface import TrainingState
from moc.state.region import Region


class Box(NamedTuple):
    """What a worker holds of a slot of a tensor.

    Attributes:
        name: of the tensor in the unpartitioned model.
        slot: as in :class:`~moc.state.fragments.Fragment`.
        region: the box.
        gives: the worker's stage saves it, and has it therefore; if not, the worker is to be given it.
    """

    name: str
    slot: str
    region: Region
    gives: bool


class Gift(NamedTuple):
    """A box that one rank gives another: of its ``given``-th box to the other's ``taken``-th one."""

    source: int
    given: int
    target: int
    taken: int
    region: Region


def saved_elsewhere(fragment: Fragment) -> bool:
    """Whether an earlier pipeline stage saves it, and not the one of this worker."""
    return fragment.replica[0] != 0


def give_to_other_stages(state: TrainingState, fragments: Iterable[Fragment], takes: bool) -> None:
    """Fills what other stages save of this worker's state, from what they have loaded; a collective call.

    Args:
        state: of this worker.
        fragments: what all workers have loaded, but for what is :func:`saved_elsewhere`.
        takes: this worker is to be given what is; not if it keeps its state.
    """
    loaded = list(fragments)
    wanted = {fragment.name for fragment in loaded if takes and saved_elsewhere(fragment)}
    tied = set().union(*gather(wanted))
    if not tied:
        return
    mine = [one for one in loaded if one.name in tied and (takes or not saved_elsewhere(one))]
    told = gather([Box(one.name, one.slot, one.region, not saved_elsewhere(one)) for one in mine])
    filled = {number: torch.empty_like(one.view) for number, one in enumerate(mine) if saved_elsewhere(one)}
    rank = dist.get_rank()
    for gift in gifts(told):
        if gift.source == rank:
            dist.send(_box(mine[gift.given].view, mine[gift.given].region, gift.region).contiguous(), gift.target)
        elif gift.target == rank:
            values = torch.empty(gift.region.shape, dtype=mine[gift.taken].view.dtype, device=filled[gift.taken].device)
            dist.recv(values, gift.source)
            _box(filled[gift.taken], mine[gift.taken].region, gift.region).copy_(values)
    for number, values in filled.items():
        state.load(mine[number], values)


def gifts(told: Sequence[Sequence[Box]]) -> Iterator[Gift]:
    """Who gives whom what; the same on all ranks, in an order in which nobody waits for ever.

    Args:
        told: by rank its boxes; those of several givers are the same or do not overlap.

    Yields:
        For each box that is to be given, parts that cover it, each element once.

    Raises:
        ValueError: nobody has some of it.
    """
    for target, boxes in enumerate(told):
        for taken, box in enumerate(boxes):
            if box.gives:
                continue
            parts = {}
            for source, given, other in _givers(told, box):
                common = box.region.intersect(other.region)
                if common is not None:
                    parts.setdefault(common, Gift(source, given, target, taken, common))
            if sum(region.numel for region in parts) != box.region.numel:
                raise ValueError(f"no pipeline stage saves all of {box.slot} of {box.name}")
            yield from parts.values()


def _givers(told: Sequence[Sequence[Box]], wanted: Box) -> Iterator[tuple[int, int, Box]]:
    for source, boxes in enumerate(told):
        for given, box in enumerate(boxes):
            if box.gives and (box.name, box.slot) == (wanted.name, wanted.slot):
                yield source, given, box


def _box(values: torch.Tensor, region: Region, part: Region) -> torch.Tensor:
    return values.view(region.shape)[part.slices(region.offset)]
