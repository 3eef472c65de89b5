"""Sends planned transfers of state between workers: round by round, in all-to-alls of bounded size.

Arriving state is separate from state in use. Chunks in transit take additional memory: on average over the workers, at
most :data:`moc.elastic.transfers.MAX_CHUNK_BYTES` bytes in each direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from moc.elastic.transfers import MAX_CHUNK_BYTES, Transfer
from moc.faults import reach

Parts = Sequence[torch.Tensor]
"""Flat tensors of bytes, whose concatenation is the state of an operator."""


def as_bytes(tensors: Iterable[torch.Tensor]) -> Parts:
    """Returns flat tensors of any dtype as bytes, in the same memory."""
    return [tensor.view(torch.uint8) for tensor in tensors]


def send(
    found: Iterable[Transfer], state: Callable[[str], Parts], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Executes transfers of byte chunks; a collective of the group, which numbers the ranks of the transfers.

    Args:
        found: transfers by round, identical on all ranks; regions are byte ranges of an operator's state.
        state: returns the state of an operator that this rank sends or receives; arriving chunks are written there.
        group: group of all ranks.
        device: device of the state.
    """
    before = 0
    for batch in _batches(found, MAX_CHUNK_BYTES * dist.get_world_size(group)):
        if batch[0].round > before:
            before = batch[0].round
            reach("passing_on")
        _exchange(batch, state, group, device)


def _exchange(
    batch: Sequence[Transfer], state: Callable[[str], Parts], group: dist.ProcessGroup, device: torch.device
) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    out = sorted((one for one in batch if one.source == rank), key=lambda one: one.target)
    new = sorted((one for one in batch if one.target == rank), key=lambda one: one.source)
    sent, coming = [0] * size, [0] * size
    for one in out:
        sent[one.target] += one.chunk.nbytes
    for one in new:
        coming[one.source] += one.chunk.nbytes
    leaving = [view for one in out for view in _views(state, one)]
    outgoing = torch.cat(leaving) if leaving else torch.empty(0, dtype=torch.uint8, device=device)
    incoming = torch.empty(sum(coming), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, outgoing, coming, sent, group=group)
    arrived = [view for one in new for view in _views(state, one)]
    for view, values in zip(arrived, incoming.split([len(view) for view in arrived]), strict=True):
        view.copy_(values)


def _views(state: Callable[[str], Parts], one: Transfer) -> Iterator[torch.Tensor]:
    """Yields the memory of a chunk."""
    (start,), (count,) = one.chunk.region.offset, one.chunk.region.shape
    stop, begin = start + count, 0
    for part in state(one.chunk.operator):
        first, last = max(start - begin, 0), min(stop - begin, len(part))
        if first < last:
            yield part[first:last]
        begin += len(part)


def _batches(found: Iterable[Transfer], most: int) -> Iterator[list[Transfer]]:
    """Yields the transfers in order, in batches of one round and at most ``most`` bytes (or one transfer)."""
    batch: list[Transfer] = []
    size = 0
    for one in found:
        if batch and (size + one.chunk.nbytes > most or batch[0].round != one.round):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += one.chunk.nbytes
    if batch:
        yield batch
