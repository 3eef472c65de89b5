"""What the peer needs to run without a GPU; put on from outside, before its engine is built."""

# DeepSpeed need not be installed where types are checked.
# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from typing import Any

import torch


def install() -> None:
    """Changes the imported DeepSpeed in this process.

    * its shared-memory operator, which only inference uses, is not compiled;
    * fp16 is allowed: it is slow on most CPUs, and right;
    * what ``all_gather_into_tensor`` writes to may be a view of a parameter, which gloo refuses.
    """
    import deepspeed  # noqa: F401  (its modules must be there)
    from deepspeed.accelerator import get_accelerator

    backend: Any = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None
    get_accelerator().is_fp16_supported = lambda: True
    gather = torch.distributed.all_gather_into_tensor

    def gather_detached(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args, **kwargs):
        return gather(output_tensor.detach(), input_tensor.detach(), *args, **kwargs)

    torch.distributed.all_gather_into_tensor = gather_detached
