"""Collective helpers that share one worker's result or error with all, so that no worker waits for a failed one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moc.runtime.plain import PlainError, decode, encode
from moc.runtime.world import World
from moc.store.errors import CheckpointError, TakenError

MOST_BYTES = 1 << 30
"""Most bytes that a worker tells the others at once."""


def run_on_rank0(action: Callable, what: str):
    """Runs ``action`` on rank 0; every rank returns its result or raises its error.  Collective.

    Args:
        action: returns a JSON-serializable value; a ``Path`` becomes None.
        what: prefix of the message if the file system fails.

    Raises:
        CheckpointError: on all ranks, if the action raised it (also as :class:`TakenError`) or an OSError.
    """
    outcome = [None, None, False]
    if dist.get_rank() == 0:
        try:
            result = action()
            outcome[0] = None if isinstance(result, Path) else result
        except CheckpointError as error:
            outcome[1:] = str(error), isinstance(error, TakenError)
        except OSError as error:
            outcome[1] = f"{what}: {error}; check the path, its permissions and free space"
    result, error, taken = _from_rank0(outcome)
    if error:
        raise (TakenError if taken else CheckpointError)(error)
    return result


def run_on_all(action: Callable[[], None], what: str) -> None:
    """Runs ``action`` on every rank; raises CheckpointError on all if one does, or OSError.  Collective.

    ``what`` is as in :func:`run_on_rank0`.
    """
    problem = None
    try:
        action()
    except CheckpointError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{what}: {error}; check the path, its permissions and free space"
    if problem := first_reported(problem):
        raise CheckpointError(problem)


def first_reported(value):
    """The first value over all ranks that is not None, or None.  Collective."""
    return next((v for v in gather(value) if v is not None), None)


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


def _from_rank0(value):
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


def _value(data: bytes):
    try:
        return decode(data)
    except PlainError as error:
        raise RuntimeError(f"what a worker told the others is of no worker of this job: {error}") from None


def sum_over_workers(values: Mapping[str, torch.Tensor | float], world: World) -> dict[str, Any]:
    """Sums each value over all ranks in one float64 all-reduce; a 1-D tensor yields a list of element sums."""
    tensors = [torch.as_tensor(v, dtype=torch.float64, device=world.device) for v in values.values()]
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(packed)
    sums = iter(packed.tolist())
    return {
        name: [next(sums) for _ in range(tensor.numel())] if tensor.dim() else next(sums)
        for name, tensor in zip(values, tensors, strict=True)
    }


def first_line(error: BaseException) -> str:
    """First line of an error's message, or its type name; at most 300 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
