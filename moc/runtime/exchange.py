"""Exchanges plain values between workers (:mod:`moc.runtime.plain`).

The exchange uses host memory (:mod:`moc.runtime.host_group`), so it proves nothing about work enqueued on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moc.runtime.host_group import host_group
from moc.runtime.plain import PlainError, decode, encode

MOST_BYTES = 1 << 30
"""Most bytes that a worker sends in one exchange."""


def gather(value, group=None) -> list:
    """Returns the values of all ranks of a group (default: all), by group rank.  Collective over the group.

    Each value must be accepted by :func:`moc.runtime.plain.encode`.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < dist.get_world_size():
        return _gather_among(ranks, value)
    mine, size = _tensor(encode(value)), len(ranks)
    lengths = mine.new_empty(size, dtype=torch.int64)
    dist.all_gather_into_tensor(lengths, mine.new_tensor([len(mine)], dtype=torch.int64), group=host_group())
    padded = mine.new_zeros(most := _checked(max(lengths.tolist())))
    padded[: len(mine)] = mine
    whole = mine.new_empty(size * most)
    dist.all_gather_into_tensor(whole, padded, group=host_group())
    data = whole.numpy().tobytes()
    return [_value(data[i * most : i * most + length]) for i, length in enumerate(lengths.tolist())]


def _gather_among(ranks: Sequence[int], value) -> list:
    """Gathers values of some workers through the first of them; other workers need not call it."""
    first, *others = ranks
    if dist.get_rank() != first:
        _send(value, first)
        return _receive(first)
    values = [value, *map(_receive, others)]
    for other in others:
        _send(values, other)
    return values


def _send(value, rank: int) -> None:
    data = _tensor(encode(value))
    dist.send(data.new_tensor([len(data)], dtype=torch.int64), rank, group=host_group())
    dist.send(data, rank, group=host_group())


def _receive(rank: int) -> Any:
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, rank, group=host_group())
    data = torch.empty(_checked(int(length)), dtype=torch.uint8)
    dist.recv(data, rank, group=host_group())
    return _value(data.numpy().tobytes())


def from_rank0(value) -> Any:
    """Returns rank 0's value on all ranks.  Collective."""
    mine = _tensor(encode(value))
    length = mine.new_tensor([len(mine)], dtype=torch.int64)
    dist.broadcast(length, src=0, group=host_group())
    data = mine if dist.get_rank() == 0 else mine.new_empty(_checked(int(length)))
    dist.broadcast(data, src=0, group=host_group())
    return _value(data.numpy().tobytes())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _checked(nbytes: int) -> int:
    if not 0 <= nbytes <= MOST_BYTES:
        raise RuntimeError(f"a worker tells the others {nbytes} bytes: none of this job tells more than {MOST_BYTES}")
    return nbytes


def _value(data: bytes) -> Any:
    try:
        return decode(data)
    except PlainError as error:
        raise RuntimeError(f"what a worker told the others is of no worker of this job: {error}") from None
