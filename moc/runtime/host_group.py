"""The group of all workers whose operations run in host memory: votes, gathers and agreements travel over it.

On a GPU an operation is only enqueued when the call returns.  After an abort the stream goes on over undefined memory,
and a peer's abort may even complete this worker's operation with undefined memory, before this worker hears of it.
gloo's operations are complete when they return, or raise: no result is ambiguous.  So what workers agree on goes over
gloo, after each has brought its part to the host.  A vote that completes hence proves that no worker's generation was
over when its ballot had come from the device, and so that everything before the ballot is valid on all workers.
"""

from __future__ import annotations

import torch.distributed as dist

_group: dist.ProcessGroup | None = None


def host_group() -> dist.ProcessGroup | None:
    """The group; None for the world's own, whose backend is gloo."""
    return _group


def use(group: object) -> None:
    """Sets the group, if the world's own is of another backend than gloo; None if it is gloo's, or gone."""
    global _group
    assert group is None or isinstance(group, dist.ProcessGroup)  # every worker is a member
    _group = group
