"""Checks that flags can be combined with elastic training."""

from __future__ import annotations

import os

from megatron.pretraining.config.flag import Problems
from megatron.pretraining.config.groups import FlagGroups


def check_elastic(config: FlagGroups, problems: Problems) -> None:
    """Adds a problem for each flag that cannot be combined with ``--elastic``."""
    if not config.elastic.elastic:
        return
    for check in (_check_batch, _check_experts, _check_dispatch, _check_parallel, _check_snapshots):
        problems.check(check, config, problems)
    problems.refuse(
        "TORCHELASTIC_RUN_ID" in os.environ,
        "--elastic needs a launcher that keeps the workers that are left, and torchrun ends them. Fix: start the job "
        "with python -m moc.launch",
        code="elastic-under-torchrun",
    )


def _check_batch(config: FlagGroups, problems: Problems) -> None:
    training = config.training
    problems.refuse(
        training.global_batch_size is None,
        "--elastic needs --global-batch-size, which does not change with the number of workers. Fix: add it",
        code="elastic-needs-flag",
    )
    problems.refuse(
        not training.calculate_per_token_loss,
        "--elastic needs --calculate-per-token-loss, since gradients must not depend on the number of workers. Fix: "
        "add it",
        code="elastic-needs-flag",
    )


def _check_experts(config: FlagGroups, problems: Problems) -> None:
    moe, everywhere, slots = config.moe, config.elastic.everywhere, config.elastic.elastic_slots
    problems.refuse(
        moe.num_experts is None,
        "--elastic places experts, and the model has none. Fix: add --num-experts, or drop it",
        code="elastic-needs-flag",
    )
    problems.refuse(
        everywhere is not None and slots is not None and everywhere > slots,
        f"--elastic-everywhere {everywhere} is more than --elastic-slots {slots}. Fix: lower it to {slots}",
        code="flag-exceeds-another",
    )
    problems.refuse(
        moe.moe_grouped_gemm,
        "--elastic computes experts one by one, whose numbers of tokens differ. Fix: drop --moe-grouped-gemm",
        code="elastic-excludes-flag",
    )


def _check_dispatch(config: FlagGroups, problems: Problems) -> None:
    moe = config.moe
    problems.refuse(
        moe.num_experts is not None and moe.moe_token_dispatcher_type != "alltoall",
        f"--elastic has a dispatcher of its own. Fix: drop --moe-token-dispatcher-type {moe.moe_token_dispatcher_type}",
        code="elastic-excludes-flag",
    )
    problems.refuse(
        moe.moe_permute_fusion,
        "--elastic has a dispatcher of its own, without fused kernels. Fix: drop --moe-permute-fusion",
        code="elastic-excludes-flag",
    )
    problems.refuse(
        moe.moe_pad_expert_input_to_capacity,
        "--elastic sends tokens without padding. Fix: drop --moe-pad-expert-input-to-capacity",
        code="elastic-excludes-flag",
    )
    problems.refuse(
        moe.moe_shared_expert_overlap,
        "--elastic does not compute shared experts during its dispatch. Fix: drop --moe-shared-expert-overlap",
        code="elastic-excludes-flag",
    )


def _check_parallel(config: FlagGroups, problems: Problems) -> None:
    parallel = config.parallel
    for name, spelling in (
        ("expert_model_parallel_size", "--expert-model-parallel-size"),
        ("expert_tensor_parallel_size", "--expert-tensor-parallel-size"),
    ):
        problems.refuse(
            getattr(parallel, name) > 1,
            f"--elastic places complete experts itself. Fix: drop {spelling} {getattr(parallel, name)}",
            code="elastic-excludes-flag",
        )
    for on, spelling in (
        (parallel.overlap_grad_reduce, "--overlap-grad-reduce"),
        (parallel.overlap_param_gather, "--overlap-param-gather"),
    ):
        problems.refuse(
            on,
            f"--elastic sums gradients of replicas after the backward pass. Fix: drop {spelling}",
            code="elastic-excludes-flag",
        )
    problems.refuse(
        config.virtual_pipeline_model_parallel_size,
        "--elastic works with plain pipeline schedules. Fix: drop --num-layers-per-virtual-pipeline-stage and "
        "--num-virtual-stages-per-pipeline-rank",
        code="elastic-excludes-flag",
    )


def _check_snapshots(config: FlagGroups, problems: Problems) -> None:
    snapshot = config.snapshot
    problems.refuse(
        snapshot.upstream_logging,
        "--elastic does not replay single pipeline stages. Fix: drop --upstream-logging",
        code="elastic-excludes-flag",
    )
