"""What elastic training does not go together with."""

from __future__ import annotations

import os

from megatron.pretraining.config.flag import refuse
from megatron.pretraining.config.groups import FlagGroups


def check_elastic(config: FlagGroups) -> None:
    """Refuses what elastic training does not go together with; raises ConfigError."""
    if not config.elastic.elastic:
        return
    _check_batch(config)
    _check_model(config)
    _check_parallel(config)
    _check_snapshots(config)
    refuse(
        "TORCHELASTIC_RUN_ID" in os.environ,
        "--elastic needs a launcher that keeps the workers that are left, and torchrun ends them: start the job with "
        "python -m moc.launch.",
    )


def _check_batch(config: FlagGroups) -> None:
    training = config.training
    refuse(
        training.global_batch_size is None,
        "--elastic needs --global-batch-size, which does not change with the number of workers: add it.",
    )
    refuse(
        not training.calculate_per_token_loss,
        "--elastic needs --calculate-per-token-loss: gradients must not depend on the number of workers: add it.",
    )


def _check_model(config: FlagGroups) -> None:
    moe, everywhere, slots = config.moe, config.elastic.everywhere, config.elastic.elastic_slots
    refuse(moe.num_experts is None, "--elastic places experts, and the model has none: add --num-experts, or drop it.")
    refuse(
        everywhere is not None and slots is not None and everywhere > slots,
        f"--elastic-everywhere {everywhere} is more than --elastic-slots {slots}: lower it to {slots}.",
    )
    refuse(
        moe.moe_grouped_gemm,
        "--elastic computes experts one by one, whose numbers of tokens differ: drop --moe-grouped-gemm.",
    )
    refuse(
        moe.moe_token_dispatcher_type != "alltoall",
        f"--elastic has a dispatcher of its own: drop --moe-token-dispatcher-type {moe.moe_token_dispatcher_type}.",
    )
    refuse(
        moe.moe_permute_fusion,
        "--elastic has a dispatcher of its own, without fused kernels: drop --moe-permute-fusion.",
    )
    refuse(
        moe.moe_pad_expert_input_to_capacity,
        "--elastic sends tokens without padding: drop --moe-pad-expert-input-to-capacity.",
    )
    refuse(
        moe.moe_router_load_balancing_type in ("global_aux_loss", "quantile_balancing"),
        f"--moe-router-load-balancing-type {moe.moe_router_load_balancing_type} depends on the number of workers, "
        "which --elastic changes: choose aux_loss or seq_aux_loss.",
    )
    refuse(
        moe.moe_shared_expert_overlap,
        "--elastic does not compute shared experts during its dispatch: drop --moe-shared-expert-overlap.",
    )


def _check_parallel(config: FlagGroups) -> None:
    parallel = config.parallel
    for name, spelling in (
        ("expert_model_parallel_size", "--expert-model-parallel-size"),
        ("expert_tensor_parallel_size", "--expert-tensor-parallel-size"),
    ):
        refuse(
            getattr(parallel, name) > 1,
            f"--elastic places whole experts itself: drop {spelling} {getattr(parallel, name)}.",
        )
    for on, spelling in (
        (parallel.overlap_grad_reduce, "--overlap-grad-reduce"),
        (parallel.overlap_param_gather, "--overlap-param-gather"),
    ):
        refuse(on, f"--elastic sums gradients of replicas after the backward pass: drop {spelling}.")
    refuse(
        config.virtual_pipeline_model_parallel_size,
        "--elastic works with plain pipeline schedules: drop --num-layers-per-virtual-pipeline-stage and "
        "--num-virtual-stages-per-pipeline-rank.",
    )


def _check_snapshots(config: FlagGroups) -> None:
    snapshot = config.snapshot
    refuse(
        snapshot.upstream_logging,
        "--elastic does not replay single pipeline stages: drop --upstream-logging.",
    )
