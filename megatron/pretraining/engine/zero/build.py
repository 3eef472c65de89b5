"""Builds DeepSpeed's ZeRO optimizer over a model chunk, on megatron-core's process groups, and attaches it to them."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig

from megatron.pretraining.config import Config
from megatron.pretraining.engine.zero.chunk import ZeroChunk
from megatron.pretraining.engine.zero.optimizer import ZeroOptimizer


def load() -> Any:
    """Imports all modules that DeepSpeed's optimizer needs, including its lazy imports; starts no thread."""
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
        backend.all_gather_function = lambda **arguments: dist.all_gather_into_tensor(**arguments)
    return module


def build_zero_optimizer(config: Config, chunk: ZeroChunk, core_config: OptimizerConfig) -> ZeroOptimizer:
    """Builds DeepSpeed's optimizer over a chunk, and moves its parameters into flat buffers; no collective."""
    module, zero = attach(), config.zero
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig
    from deepspeed.utils.timer import NoopTimer

    inner = torch.optim.AdamW(
        _parameter_groups(config, chunk),
        lr=config.learning_rate.lr,
        betas=(core_config.adam_beta1, core_config.adam_beta2),
        eps=core_config.adam_eps,
        weight_decay=core_config.weight_decay,
    )
    offload = DeepSpeedZeroOffloadOptimizerConfig.model_validate({"device": "cpu", "pin_memory": zero.use_pin_memory})
    optimizer = module.DeepSpeedZeroOptimizer(
        inner,
        {parameter: name for name, parameter in chunk.named_parameters()},
        NoopTimer(),
        {},
        contiguous_gradients=True,
        reduce_bucket_size=zero.zero_reduce_bucket_size,
        use_multi_rank_bucket_allreduce=zero.zero_multi_rank_bucket_allreduce,
        allgather_bucket_size=zero.zero_allgather_bucket_size,
        reduce_scatter=True,
        overlap_comm=False,
        offload_optimizer_config=offload if zero.cpu_optimizer else None,
        mpu=_model_parallel_unit(),
        clip_grad=0.0,  # the optimizer's ``apply`` clips
        gradient_accumulation_dtype=_DTYPES[zero.zero_grad_accum_dtype],
        communication_data_type=_DTYPES[zero.zero_communication_dtype],
        gradient_average=False,
        partition_grads=zero.zero_stage == 2,
        round_robin_gradients=zero.zero_round_robin_gradients,
        check_grad_overflow=False,
        **_groups_of(inner, chunk),
    )
    return ZeroOptimizer(optimizer, chunk, core_config, module.all_gather_dp_groups)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _groups_of(inner: torch.optim.Optimizer, chunk: ZeroChunk) -> dict:
    """Returns the process groups; experts have their own, under the name of their parameter group."""
    groups: dict[str, Any] = dict(dp_process_group=chunk.dp_cp_group)
    experts = [group["name"] for group in inner.param_groups if group["moe"]]
    if experts:
        groups |= dict(
            has_moe_layers=True,
            expert_parallel_group={experts[0]: parallel_state.get_expert_model_parallel_group()},
            expert_data_parallel_group={experts[0]: parallel_state.get_expert_data_parallel_group()},
        )
    return groups


def _parameter_groups(config: Config, chunk: ZeroChunk) -> list[dict]:
    """Returns parameter groups by (expert, weight decay, dtype), with the keys of megatron-core and DeepSpeed."""
    rate, decay = config.learning_rate, config.regularization.weight_decay
    experts = f"ep_size_{config.parallel.expert_model_parallel_size}"
    groups: dict[tuple, dict] = {}
    for name, parameter in chunk.named_parameters():
        is_expert = not getattr(parameter, "allreduce", True)
        decays = not (name.endswith(".bias") or parameter.dim() == 1)  # as in Megatron-LM
        if is_expert:
            marked: Any = parameter
            marked.group_name = experts  # the key under which DeepSpeed looks for the process group
        settings = dict(
            params=[],
            moe=is_expert,
            name=experts if is_expert else "dense",
            is_expert_parallel=is_expert,
            lr=rate.lr,
            max_lr=rate.lr,
            min_lr=rate.min_lr,
            lr_mult=1.0,
            wd_mult=float(decays),
            weight_decay=decay * decays,
        )
        groups.setdefault((is_expert, decays, parameter.dtype), settings)["params"].append(parameter)
    return list(groups.values())


def _model_parallel_unit() -> SimpleNamespace:
    """Returns the interface through which DeepSpeed queries model parallelism."""
    group: Any = parallel_state.get_model_parallel_group()
    return SimpleNamespace(
        get_model_parallel_group=lambda: group,
        get_model_parallel_world_size=group.size,
        get_model_parallel_rank=parallel_state.get_tensor_model_parallel_rank,
        get_tensor_model_parallel_rank=parallel_state.get_tensor_model_parallel_rank,
    )
