"""Checks that values computed by collectives on a device are valid (:mod:`moc.runtime.groups`).

Code that uses such values on the host, or installs them in state that outlives the generation, calls these functions.
Nothing else detects that the generation ended meanwhile and the values are undefined.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from moc.runtime.device import synchronize
from moc.runtime.group import Group


def settled(device: torch.device) -> None:
    """Waits until all work enqueued on this process's device is complete; checks that this process has not aborted it.

    Raises:
        Aborted: the generation of our groups is over, so results are undefined.
    """
    synchronize(device)
    check_generation()


def on_host(values: torch.Tensor) -> torch.Tensor:
    """Copies values to host memory, which waits for the device; checks that this process has not aborted them.

    Peers may have aborted them, unless all workers agree on the values later, as in a commit all-reduce.

    Raises:
        Aborted: the generation of our groups is over, so the values are undefined.
    """
    there = values.cpu()
    check_generation()
    return there


def check_generation() -> None:
    """Raises Aborted if this generation is over; on a GPU, results of collectives may then be undefined."""
    world = dist.group.WORLD
    if isinstance(world, Group):
        world.live()
