"""Values of all workers, or of one, told to all as plain values: see :mod:`moc.runtime.plain`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moc.runtime.plain import PlainError, decode, encode

MOST_BYTES = 1 << 30
"""Most bytes that a worker tells the others at once."""


def gather(value, group=None) -> list:
    """The values of all ranks of a group (default: all), by group rank.  Collective over the group.

    The values are such as :func:`moc.runtime.plain.encode` takes.
    """
    mine, size = _tensor(encode(value), group), dist.get_world_size(group)
    lengths = mine.new_empty(size, dtype=torch.int64)
    dist.all_gather_into_tensor(lengths, mine.new_tensor([len(mine)], dtype=torch.int64), group=group)
    padded = mine.new_zeros(most := _checked(max(lengths.tolist())))
    padded[: len(mine)] = mine
    whole = mine.new_empty(size * most)
    dist.all_gather_into_tensor(whole, padded, group=group)
    data = whole.cpu().numpy().tobytes()
    return [_value(data[i * most : i * most + length]) for i, length in enumerate(lengths.tolist())]


def from_rank0(value) -> Any:
    """Rank 0's value, on all ranks.  Collective."""
    mine = _tensor(encode(value), None)
    length = mine.new_tensor([len(mine)], dtype=torch.int64)
    dist.broadcast(length, src=0)
    data = mine if dist.get_rank() == 0 else mine.new_empty(_checked(int(length)))
    dist.broadcast(data, src=0)
    return _value(data.cpu().numpy().tobytes())


def _tensor(data: bytes, group) -> torch.Tensor:
    on_gpu = dist.get_backend(group) == "nccl"
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to("cuda" if on_gpu else "cpu")


def _checked(nbytes: int) -> int:
    if not 0 <= nbytes <= MOST_BYTES:
        raise RuntimeError(f"a worker tells the others {nbytes} bytes: none of this job tells more than {MOST_BYTES}")
    return nbytes


def _value(data: bytes) -> Any:
    try:
        return decode(data)
    except PlainError as error:
        raise RuntimeError(f"what a worker told the others is of no worker of this job: {error}") from None
