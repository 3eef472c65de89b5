"""Holds the group of all workers for host memory: commit all-reduces, gathers and agreements use it.

On a GPU an operation is only enqueued when the call returns.  After an abort the stream continues over undefined
memory.  A peer's abort may even complete this worker's operation with undefined memory, before this worker receives
the abort.  gloo's operations are complete when they return, or raise: no result is ambiguous.

So workers agree over gloo, after each has copied its contribution to the host.  A completed commit all-reduce proves
that no worker's generation was over when its contribution reached the host.  Everything before the contribution is
therefore valid on all workers.
"""

from __future__ import annotations

import torch.distributed as dist

_group: dist.ProcessGroup | None = None


def host_group() -> dist.ProcessGroup | None:
    """Returns the group; None for the world's own, whose backend is gloo."""
    return _group


def use(group: object) -> None:
    """Sets the group; None if the world's own backend is gloo, or the world is destroyed."""
    global _group
    assert group is None or isinstance(group, dist.ProcessGroup)  # every worker is a member
    _group = group
