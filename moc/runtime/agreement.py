"""What one worker finds out, all know: results and errors are shared; nobody waits for a worker that gave up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moc.runtime.world import World
from moc.store.errors import CheckpointError, TakenError


def run_on_rank0(action: Callable, what: str):
    """Runs ``action`` on the first worker; all return its result, or raise its error; a collective call.

    Args:
        action: returns something that JSON could hold; a path counts as nothing.
        what: begins the message if the file system refuses.

    Raises:
        CheckpointError: on all workers, if the action raised one, or an OSError; TakenError, if it raised one.
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
    dist.broadcast_object_list(outcome, src=0)
    result, error, taken = outcome
    if error:
        raise (TakenError if taken else CheckpointError)(error)
    return result


def run_on_all(action: Callable[[], None], what: str) -> None:
    """Runs ``action`` on every worker; a collective call.

    Args:
        action: what to do.
        what: begins the message if the file system refuses.

    Raises:
        CheckpointError: on all workers, if the action raised one on any of them, or an OSError.
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
    """The first value over all workers that is not None, or None; a collective call."""
    return next((v for v in gather(value) if v is not None), None)


def gather(value, group=None) -> list:
    """The values of all workers of a group (default: all), by rank in the group; a collective call of them."""
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def sum_over_workers(values: Mapping[str, torch.Tensor | float], world: World) -> dict[str, Any]:
    """Adds up each value over all workers, in one all-reduce of float64; of a 1-D tensor, each element, into a list."""
    tensors = [torch.as_tensor(v, dtype=torch.float64, device=world.device) for v in values.values()]
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(packed)
    sums = iter(packed.tolist())
    return {
        name: [next(sums) for _ in range(tensor.numel())] if tensor.dim() else next(sums)
        for name, tensor in zip(values, tensors, strict=True)
    }


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
