"""The example of plain PyTorch on a device that lies: see :mod:`tests.lying`."""

import os
import sys
from functools import partial

from examples import pure_torch
from moc.runtime.managed_job import ManagedJob


def on_device() -> None:
    """Lets its groups be NCCL's, as the device has them."""
    connect = ManagedJob.connect
    ManagedJob.connect = lambda self, _, timeout, device: connect(self, "nccl", timeout, device)
    if memory := os.environ.get("LYING_MEMORY"):
        pure_torch.Settings = partial(pure_torch.Settings, memory_dir=memory)


if __name__ == "__main__":
    from tests import lying

    on_device()
    lying.install()
    try:
        pure_torch.main()
    except (pure_torch.CheckpointError, ValueError) as error:
        sys.exit(f"pure_torch: {error}")
