"""Imports DeepSpeed, as the only module that does, and attaches it to existing process groups."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist


def load() -> Any:
    """Imports all modules that DeepSpeed's optimizer needs, including its lazy imports; starts no thread.

    Returns:
        The module of DeepSpeed's optimizer for stages 1 and 2.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")  # prevents probing
    from deepspeed.runtime.zero import stage_1_and_2

    compiler = torch.compile
    torch.compile = lambda *_, **__: lambda function: function  # for Muon, which is not used: it would load inductor
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        torch.compile = compiler
    return stage_1_and_2


def attach() -> Any:
    """Attaches DeepSpeed to torch.distributed, without communication.

    Returns:
        The module of DeepSpeed's optimizer for stages 1 and 2.
    """
    module = load()
    import deepspeed.comm as comm

    if comm.comm.cdb is None:
        # only for inference, and takes half a minute to compile; ``deepspeed.comm.torch`` is an alias of torch itself
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
        comm.init_distributed(
            dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False, dist_init_required=False
        )
        backend: Any = comm.comm.cdb
        # looked up in each call: while a replacement builds without peers, torch has a stand-in, which must not be kept
        backend.all_gather_function = lambda **how: dist.all_gather_into_tensor(**how)
    return module
