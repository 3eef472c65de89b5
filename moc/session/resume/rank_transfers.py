"""Plans and executes transfers of state between ranks after a recovery.

Survivors send state to replacements of the same part (replicas). Several pipeline stages can hold the same weights:
embeddings tied to the output layer. Only the first of these stages saves them, so no other node has them in its memory.
After loading, that stage sends them to the others, in any layout: ZeRO shards the same weights differently in each
stage.

Transfers boxes of tensors between workers, from any holder to any receiver. All workers know which worker has and
needs each box. So all compute the same transfers without communication.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import xxhash

from moc.recovery.plan import RankCopy
from moc.runtime.collectives import gather
from moc.state.interface import TrainingState
from moc.state.operators import Detail, Fragment, Region

MOST = 64 << 20
"""Maximum bytes of one transfer."""


class Box(NamedTuple):
    """A box of a slot of a tensor that a worker has or needs.

    Attributes:
        name: of the tensor in the unpartitioned model.
        slot: as in :class:`~moc.state.operators.Fragment`.
        region: the box.
        itemsize: bytes of an element.
    """

    name: str
    slot: str
    region: Region
    itemsize: int


class RegionTransfer(NamedTuple):
    """A region sent from the ``held``-th box that the source has to the ``wanted``-th box that the target needs."""

    source: int
    held: int
    target: int
    wanted: int
    region: Region


def transfers(
    held: Sequence[Sequence[Box]], wanted: Sequence[Sequence[Box]], most: int = MOST
) -> tuple[list[RegionTransfer], list[Box]]:
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
                found.append(RegionTransfer(source, its, target, number, common))
                left.extend(region.without(common))
    return _in_turns(found), missing


def _in_turns(found: Iterable[RegionTransfer]) -> list[RegionTransfer]:
    """Orders transfers so that those between different workers run at the same time."""
    free, turns = Counter(), defaultdict(list)
    for one in found:
        turn = max(free[one.source], free[one.target])
        free[one.source] = free[one.target] = turn + 1
        turns[turn].append(one)
    return [one for turn in sorted(turns) for one in turns[turn]]


def perform(
    found: Iterable[RegionTransfer],
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


def saved_elsewhere(fragment: Fragment) -> bool:
    """Whether an earlier pipeline stage, not this worker's, saves the tensor chunk."""
    return fragment.replica[0] != 0


def give_to_other_stages(state: TrainingState, fragments: Iterable[Fragment], takes: bool) -> None:
    """Fills the part of this worker's state that other stages save, from their loaded state; a collective call.

    All workers have loaded the tensor chunks that are not :func:`saved_elsewhere`.  With ``takes``, this worker
    receives the others; otherwise it keeps its state.

    Raises:
        ValueError: no stage saves a tensor chunk.
    """
    loaded = list(fragments)
    tied = set().union(*gather({one.name for one in loaded if takes and saved_elsewhere(one)}))
    if not tied:
        return
    held = [one for one in loaded if one.name in tied and not saved_elsewhere(one)]
    wanted = [one for one in loaded if takes and saved_elsewhere(one)]
    told = gather((_boxes(held), _boxes(wanted)))
    found, missing = transfers([its for its, _ in told], [its for _, its in told])
    if missing:
        raise ValueError(f"no pipeline stage saves all of {missing[0].slot} of {missing[0].name}")
    filled = [torch.empty_like(one.view) for one in wanted]
    perform(
        found,
        [(one.region, one.view) for one in held],
        [(one.region, values) for one, values in zip(wanted, filled, strict=True)],
    )
    for fragment, values in zip(wanted, filled, strict=True):
        state.load(fragment, values)


def _boxes(fragments: Iterable[Fragment]) -> list[Box]:
    return [Box(one.name, one.slot, one.region, one.view.itemsize) for one in fragments]


def part_ids(state: TrainingState) -> dict[str, str]:
    """Returns, by operator, an ID of this rank's part: see :class:`moc.recovery.plan.JobInventory`."""
    return {operator: part_id(fragments) for operator, fragments in _by_operator(state).items()}


def exchange(copies: Sequence[RankCopy], state: TrainingState, rank: int) -> int:
    """Sends and receives a plan's copies, one operator at a time; returns the bytes that this rank received.

    All ranks call it with the same copies.
    """
    held, taken = _by_operator(state), 0
    for copy in copies:
        if rank not in (copy.source, copy.target):
            continue
        fragments = held[copy.operator]
        packed = torch.cat([fragment.view.view(torch.uint8) for fragment in fragments])  # one message per operator
        if rank == copy.source:
            dist.send(packed, copy.target)
        else:
            dist.recv(packed, copy.source)
            values = packed.split([fragment.view.nbytes for fragment in fragments])
            for fragment, value in zip(fragments, values, strict=True):
                state.load(fragment, value.clone().view(fragment.view.dtype))  # aligned for its dtype
            taken += packed.nbytes
    return taken


def _by_operator(state: TrainingState) -> dict[str, list[Fragment]]:
    held = defaultdict(list)
    for fragment in state.fragments(state.operators(), Detail.FULL):
        held[fragment.operator].append(fragment)
    return held


def part_id(fragments: Sequence[Fragment]) -> str:
    """Returns an ID that is equal for the same elements of the same tensors."""
    parts = sorted((f.name, f.slot, f.region.offset, f.region.shape) for f in fragments)
    return xxhash.xxh3_64_hexdigest(repr(parts).encode())
