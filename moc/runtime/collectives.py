"""Shares a worker's result or error with all workers, so that none waits for a failed one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moc.errors import code_of, with_code
from moc.runtime.device import copy_to_host, synchronize_and_check
from moc.runtime.host_group import broadcast_from_rank0, gather, host_group
from moc.runtime.job import World
from moc.store.errors import CheckpointError, TakenError


def run_on_rank0(action: Callable, failure: str):
    """Runs ``action`` on rank 0; each rank returns its result or raises its error.  Collective.

    Args:
        action: returns a JSON-serializable value; a ``Path`` becomes None.
        failure: prefix of the message if the file system fails.

    Raises:
        CheckpointError: on all ranks, if the action raised it (also as :class:`TakenError`) or an OSError.
    """
    outcome = [None, None, False]
    if dist.get_rank() == 0:
        try:
            result = action()
            outcome[0] = None if isinstance(result, Path) else result
        except CheckpointError as error:
            outcome[1:] = with_code(error), isinstance(error, TakenError)
        except OSError as error:
            outcome[1] = f"{failure}: {error}. Fix: check the path, its permissions and free space [{code_of(error)}]"
    result, error, taken = broadcast_from_rank0(outcome)
    if error:
        raise (TakenError if taken else CheckpointError)(error)
    return result


def run_on_all(action: Callable[[], None], failure: str) -> None:
    """Runs ``action`` on every rank; raises CheckpointError on all if any raises it or OSError.  Collective.

    ``failure`` is as in :func:`run_on_rank0`.
    """
    problem = None
    try:
        action()
    except CheckpointError as error:
        problem = with_code(error)
    except OSError as error:
        problem = f"{failure}: {error}. Fix: check the path, its permissions and free space [{code_of(error)}]"
    if problem := first_reported(problem):
        raise CheckpointError(problem)


def first_reported(value: Any) -> Any:
    """Returns the first value over all ranks that is not None, or None.  Collective."""
    return next((v for v in gather(value) if v is not None), None)


def sum_over_workers(values: Mapping[str, torch.Tensor | float], world: World) -> dict[str, Any]:
    """Sums each value over all ranks in one float64 all-reduce; a 1-D tensor yields a list of element sums.

    Tensors may be on this worker's device.  They are copied to the host first, which waits for everything they depend
    on.  The sum is computed in host memory, see :mod:`moc.runtime.host_group`.

    Raises:
        Aborted, PeerFailure: as for any operation of our groups, also if the device's groups are aborted meanwhile.
    """
    tensors = [torch.as_tensor(v, dtype=torch.float64) for v in values.values()]
    contribution = _concatenate_on_host([tensor.reshape(-1) for tensor in tensors], world.device)
    dist.all_reduce(contribution, group=host_group())  # raises if the generation is over and values may be undefined
    sums = iter(contribution.tolist())
    return {
        name: [next(sums) for _ in range(tensor.numel())] if tensor.dim() else next(sums)
        for name, tensor in zip(values, tensors, strict=True)
    }


def _concatenate_on_host(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Concatenates parts in order, with a single copy for all parts on the device."""
    on_device = [part for part in tensors if part.device.type == device.type]
    if not on_device or device.type == "cpu":
        return torch.cat(tensors)
    copied = iter(copy_to_host(torch.cat(on_device)).split([part.numel() for part in on_device]))
    return torch.cat([next(copied) if part.device.type == device.type else part for part in tensors])


def synchronize_all(world: World) -> None:
    """Waits until all work that the workers have enqueued on their devices is complete and valid.  Collective.

    Raises:
        Aborted, PeerFailure: this is not confirmed.
    """
    synchronize_group(None, world.device)


def synchronize_group(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Waits until all work enqueued by a group's workers (default: all) is complete and valid.  Collective over it.

    Raises:
        Aborted, PeerFailure: this is not confirmed.
    """
    synchronize_and_check(device)
    gather(None, group)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type name; at most 300 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
