"""Flags that distribute the model and its work over workers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag


@dataclass(frozen=True)
class ParallelFlags(FlagGroup):
    """Parallelism: how the model and its work are split over workers."""

    tensor_model_parallel_size: int = flag(1, "Workers that split each layer (tensor parallelism).", limits=">= 1")
    pipeline_model_parallel_size: int = flag(1, "Pipeline stages (pipeline parallelism).", limits=">= 1")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Interleaved schedule: layers in each virtual stage.", limits=">= 1"
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "Interleaved schedule: virtual stages of each worker.", limits=">= 1"
    )
    expert_model_parallel_size: int = flag(
        1,
        "Workers that divide the experts of a layer (expert parallelism).",
        "--moe-expert-parallel-size",
        limits=">= 1",
    )
    expert_tensor_parallel_size: int = flag(
        None, "Workers that split each expert; by default --tensor-model-parallel-size.", limits=">= 1"
    )
    context_parallel_size: int = flag(1, "Workers that split each sequence; only 1 is supported.", limits=">= 1")
    sequence_parallel: bool = flag(
        False,
        "Split sequences over tensor-parallel workers outside of attention and feed-forward layers; no effect with "
        "--tensor-model-parallel-size 1.",
    )
    use_distributed_optimizer: bool = flag(False, "Shard optimizer state over data-parallel workers (ZeRO stage 1).")
    overlap_grad_reduce: bool = flag(False, "Reduce gradients during the backward pass.")
    overlap_param_gather: bool = flag(
        False, "Gather updated weights during the next forward pass; needs --use-distributed-optimizer."
    )
    overlap_p2p_comm: bool = flag(
        True,
        "Interleaved schedule: send activations during computation.",
        "--overlap-p2p-communication",
        "--no-overlap-p2p-communication",
    )
    ddp_bucket_size: int | None = flag(None, "Parameters in each bucket of reduced gradients.", limits=">= 1")
    distributed_backend: str | None = flag(
        None, "torch.distributed backend; by default nccl with CUDA, gloo without.", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(
        10, "Minutes to wait for other workers in a collective operation.", limits=">= 1"
    )
