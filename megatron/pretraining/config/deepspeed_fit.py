"""Checks that flags can be combined with DeepSpeed's optimizer, and that it is installed."""

from __future__ import annotations

from importlib import metadata

from megatron.pretraining.config.deepspeed import BEFORE, OLDEST, WANTED
from megatron.pretraining.config.flag import Problems
from megatron.pretraining.config.groups import FlagGroups
from megatron.pretraining.process.core import unchecked


def check_deepspeed(config: FlagGroups, problems: Problems) -> None:
    """Adds a problem for each flag that ``--deepspeed`` excludes, and for a missing package."""
    if config.zero.deepspeed:
        for check in (_check_pipeline, _check_data_parallelism, _check_optimizer, _check_package):
            problems.check(check, config, problems)


def _check_pipeline(config: FlagGroups, problems: Problems) -> None:
    pipeline = config.parallel.pipeline_model_parallel_size > 1
    problems.refuse(
        pipeline and config.zero.zero_stage == 2,
        "--zero-stage 2 reduces gradients after each micro batch, and cannot be combined with "
        "--pipeline-model-parallel-size greater than 1. Fix: choose --zero-stage 1",
        code="deepspeed-excludes-flag",
    )
    problems.refuse(
        config.virtual_pipeline_model_parallel_size,
        "--deepspeed does not know virtual pipeline stages. Fix: drop --num-virtual-stages-per-pipeline-rank and "
        "--num-layers-per-virtual-pipeline-stage",
        code="deepspeed-excludes-flag",
    )


def _check_data_parallelism(config: FlagGroups, problems: Problems) -> None:
    parallel = config.parallel
    problems.refuse(
        parallel.use_distributed_optimizer,
        "--deepspeed shards optimizer state itself. Fix: drop --use-distributed-optimizer",
        code="deepspeed-excludes-flag",
    )
    problems.refuse(
        parallel.overlap_grad_reduce,
        "--deepspeed does not overlap reductions. Fix: drop --overlap-grad-reduce",
        code="deepspeed-excludes-flag",
    )
    problems.refuse(
        parallel.ddp_bucket_size,
        "--ddp-bucket-size is of megatron-core's data parallelism. Fix: choose --zero-reduce-bucket-size",
        code="deepspeed-excludes-flag",
    )
    problems.refuse(
        config.elastic.elastic,
        "--deepspeed reduces gradients among fixed groups of replicas. Fix: drop --elastic",
        code="deepspeed-excludes-flag",
    )


def _check_optimizer(config: FlagGroups, problems: Problems) -> None:
    precision, optimizer = config.mixed_precision, config.regularization.optimizer
    problems.refuse(
        optimizer != "adam",
        f"--optimizer {optimizer} was not tried with --deepspeed. Fix: choose adam, or drop --deepspeed",
        code="deepspeed-excludes-flag",
    )
    problems.refuse(
        precision.moments not in (None, ("fp32", "fp32")),
        "--deepspeed keeps moments in fp32. Fix: drop --exp-avg-dtype and --exp-avg-sq-dtype",
        code="deepspeed-excludes-flag",
    )
    problems.refuse(
        precision.main_params_dtype != "fp32",
        "--deepspeed keeps masters in fp32. Fix: drop --main-params-dtype",
        code="deepspeed-excludes-flag",
    )


def _check_package(config: FlagGroups, problems: Problems) -> None:
    version = deepspeed_version()
    problems.refuse(
        version is None,
        f"--deepspeed needs the package deepspeed, which is not installed. Fix: pip install '{WANTED}'",
        code="package-missing",
    )
    problems.refuse(
        version and not unchecked() and not OLDEST <= _numbers(version) < BEFORE,
        f"deepspeed is installed in version {version}, and --deepspeed needs {WANTED}. Fix: pip install '{WANTED}'",
        code="deepspeed-version-unsupported",
    )


def deepspeed_version() -> str | None:
    """Returns the installed version of DeepSpeed without importing it; None if there is none."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])
