"""Shares a worker's result or error with all workers, so that none waits for a failed one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moc.errors import code_of, with_code
from moc.runtime.device import on_host, settled
from moc.runtime.host_group import from_rank0, gather, host_group
from moc.runtime.job import World
from moc.store.errors import CheckpointError, TakenError


def run_on_rank0(action: Callable, what: str):
    """Runs ``action`` on rank 0; each rank returns its result or raises its error.  Collective.

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
            outcome[1:] = with_code(error), isinstance(error, TakenError)
        except OSError as error:
            outcome[1] = f"{what}: {error}. Fix: check the path, its permissions and free space [{code_of(error)}]"
    result, error, taken = from_rank0(outcome)
    if error:
        raise (TakenError if taken else CheckpointError)(error)
    return result


def run_on_all(action: Callable[[], None], what: str) -> None:
    """Runs ``action`` on every rank; raises CheckpointError on all if any raises it or OSError.  Collective.

    ``what`` is as in :func:`run_on_rank0`.
    """
    problem = None
    try:
        action()
    except CheckpointError as error:
        problem = with_code(error)
    except OSError as error:
        problem = f"{what}: {error}. Fix: check the path, its permissions and free space [{code_of(error)}]"
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
        Aborted, Suspicion: as for any operation of our groups, also if the device's groups are aborted meanwhile.
    """
    tensors = [torch.as_tensor(v, dtype=torch.float64) for v in values.values()]
    packed = _packed_on_host([tensor.reshape(-1) for tensor in tensors], world.device)
    dist.all_reduce(packed, group=host_group())  # raises if the generation is over and values may be undefined
    sums = iter(packed.tolist())
    return {
        name: [next(sums) for _ in range(tensor.numel())] if tensor.dim() else next(sums)
        for name, tensor in zip(values, tensors, strict=True)
    }


def _packed_on_host(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Concatenates parts in order, with a single copy for all parts on the device."""
    there = [part for part in parts if part.device.type == device.type]
    if not there or device.type == "cpu":
        return torch.cat(parts)
    brought = iter(on_host(torch.cat(there)).split([part.numel() for part in there]))
    return torch.cat([next(brought) if part.device.type == device.type else part for part in parts])


def settled_on_all(world: World) -> None:
    """Waits until all work that the workers have enqueued on their devices is complete and valid.  Collective.

    Raises:
        Aborted, Suspicion: this is not confirmed.
    """
    settled_among(None, world.device)


def settled_among(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Waits until all work enqueued by a group's workers (default: all) is complete and valid.  Collective over it.

    Raises:
        Aborted, Suspicion: this is not confirmed.
    """
    settled(device)
    gather(None, group)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type name; at most 300 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
