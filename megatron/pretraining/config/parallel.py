"""Flags that distribute the model and its work over workers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag, refuse


@dataclass(frozen=True)
class ParallelFlags(FlagGroup):
    """Parallelism: which dimension of the work is cut into how many pieces."""

    tensor_model_parallel_size: int = flag(1, "Workers that share each layer.", at_least=1)
    pipeline_model_parallel_size: int = flag(1, "Pipeline stages.", at_least=1)
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "Interleaved schedule: layers in each of the stages that a worker alternates between.",
        at_least=1,
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "Interleaved schedule: number of stages that a worker alternates between.", at_least=1
    )
    expert_model_parallel_size: int = flag(
        1, "Workers over which the experts of a layer are spread.", "--moe-expert-parallel-size", at_least=1
    )
    expert_tensor_parallel_size: int = flag(
        None, "Workers that share each expert; by default --tensor-model-parallel-size.", at_least=1
    )
    context_parallel_size: int = flag(1, "Workers that share each sequence; only 1 is supported.", at_least=1)
    sequence_parallel: bool = flag(
        False,
        "Split the sequence between tensor-parallel workers outside of attention and feed-forward layers.  "
        "Has no "
        "effect with --tensor-model-parallel-size 1.",
    )
    use_distributed_optimizer: bool = flag(
        False, "Spread the optimizer state over data-parallel workers (ZeRO stage 1)."
    )
    overlap_grad_reduce: bool = flag(False, "Reduce gradients while the backward pass still runs.")
    overlap_param_gather: bool = flag(
        False, "Gather updated weights while the next forward pass runs; needs --use-distributed-optimizer."
    )
    overlap_p2p_comm: bool = flag(
        True,
        "Interleaved schedule: send activations to the next stage while computing.",
        "--overlap-p2p-communication",
        "--no-overlap-p2p-communication",
    )
    ddp_bucket_size: int | None = flag(None, "Parameters in each bucket of gradients that is reduced.", at_least=1)
    distributed_backend: str | None = flag(
        None, "Who communicates; by default nccl with CUDA and gloo without.", choices=("nccl", "gloo")
    )
    distributed_timeout_minutes: int = flag(10, "How long a worker waits for the others.", at_least=1)

    def validate(self) -> None:
        """Rejects context parallelism, overlaps without their prerequisites, and virtual stages without a pipeline."""
        refuse(
            self.context_parallel_size > 1,
            f"--context-parallel-size {self.context_parallel_size} is not supported: leave it at 1.",
        )
        refuse(
            self.overlap_param_gather and not self.use_distributed_optimizer,
            "--overlap-param-gather needs --use-distributed-optimizer: add it.",
        )
        refuse(
            self.overlap_param_gather and not self.overlap_grad_reduce,
            "--overlap-param-gather needs --overlap-grad-reduce: add it.",
        )
        layers, stages = self.num_layers_per_virtual_pipeline_stage, self.num_virtual_stages_per_pipeline_rank
        refuse(
            layers is not None and stages is not None,
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank say the same "
            "thing: drop one.",
        )
        spelling = "--num-layers-per-virtual-pipeline-stage" if layers else "--num-virtual-stages-per-pipeline-rank"
        refuse(
            (layers is not None or (stages or 1) > 1) and self.pipeline_model_parallel_size == 1,
            f"{spelling} needs --pipeline-model-parallel-size greater than 1: raise it, or drop {spelling}.",
        )
