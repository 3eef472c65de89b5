"""What DeepSpeed's optimizer can be combined with, and whether it is installed."""

from __future__ import annotations

from importlib import metadata

from megatron.pretraining.config.deepspeed import BEFORE, OLDEST, WANTED
from megatron.pretraining.config.flag import refuse
from megatron.pretraining.config.groups import FlagGroups
from megatron.pretraining.process.core import unchecked


def check_deepspeed(config: FlagGroups) -> None:
    """Raises ``ConfigError`` if the flags cannot be combined with ``--deepspeed``, or the package is missing."""
    zero, parallel, precision = config.zero, config.parallel, config.mixed_precision
    refuse(
        not zero.pipeline_parallel and parallel.pipeline_model_parallel_size > 1,
        f"--no-pipeline-parallel contradicts --pipeline-model-parallel-size {parallel.pipeline_model_parallel_size}: "
        "drop one of them.",
    )
    if not zero.deepspeed:
        return
    pipeline = parallel.pipeline_model_parallel_size > 1
    for wrong, what, remedy in (
        (pipeline and zero.zero_stage == 2, "--zero-stage 2 reduces gradients after each micro batch, and cannot be "
         "combined with --pipeline-model-parallel-size greater than 1", "choose --zero-stage 1"),
        (config.virtual_pipeline_model_parallel_size, "--deepspeed does not know virtual pipeline stages",
         "drop --num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage"),
        (pipeline and not config.network.untie_embeddings_and_output_weights,
         "--deepspeed cannot sum gradients of embeddings that are tied across pipeline stages",
         "add --untie-embeddings-and-output-weights"),
        (parallel.use_distributed_optimizer, "--deepspeed shards optimizer state itself",
         "drop --use-distributed-optimizer"),
        (parallel.overlap_grad_reduce, "--deepspeed does not overlap reductions", "drop --overlap-grad-reduce"),
        (parallel.ddp_bucket_size, "--ddp-bucket-size is of megatron-core's data parallelism",
         "choose --zero-reduce-bucket-size"),
        (config.elastic.elastic, "--deepspeed reduces gradients among fixed groups of replicas", "drop --elastic"),
        (config.regularization.optimizer != "adam", f"--optimizer {config.regularization.optimizer} was not tried with "
         "--deepspeed", "choose adam, or drop --deepspeed"),
        (precision.moments, "--deepspeed keeps moments in fp32", "drop --exp-avg-dtype and --exp-avg-sq-dtype"),
        (precision.main_params_dtype != "fp32", "--deepspeed keeps masters in fp32", "drop --main-params-dtype"),
    ):  # fmt: skip
        refuse(wrong, f"{what}: {remedy}.")
    version = deepspeed_version()
    refuse(
        version is None,
        "--deepspeed needs the package deepspeed, which is not installed: pip install 'moc-megatron[deepspeed]'.",
    )
    refuse(
        version and not unchecked() and not OLDEST <= _numbers(version) < BEFORE,
        f"deepspeed is installed in version {version}, and --deepspeed needs {WANTED}: "
        "pip install 'moc-megatron[deepspeed]'.",
    )


def deepspeed_version() -> str | None:
    """The installed version of DeepSpeed, which is not imported; None if there is none."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split(".")[:2])
