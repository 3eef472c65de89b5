"""DeepSpeed's ZeRO optimizer for the models of Megatron-LM's scripts: ``--deepspeed``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, cast

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config
from megatron.training import training

from megatron.pretraining.config import Config
from megatron.pretraining.config.deepspeed import BEFORE, OLDEST, WANTED
from megatron.pretraining.config.flag import Problems, convert_value, refuse
from megatron.pretraining.config.groups import all_flags
from megatron.pretraining.engine.zero.build import build_zero_optimizer, load
from megatron.pretraining.engine.zero.chunk import ZeroChunk
from megatron.pretraining.engine.zero.optimizer import ZeroOptimizer
from megatron.pretraining.entry.stock import bare_chunks, get_args, other_values
from megatron.pretraining.process.core import unchecked
from moc import private_interfaces


def check_deepspeed(config: Config, problems: Problems) -> None:
    """Adds a problem for each flag that ``--deepspeed`` excludes, and for a missing package."""
    if config.zero.deepspeed:
        for check in (_check_pipeline, _check_data_parallelism, _check_optimizer, _check_package):
            problems.check(check, config, problems)


def _check_pipeline(config: Config, problems: Problems) -> None:
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


def _check_data_parallelism(config: Config, problems: Problems) -> None:
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


def _check_optimizer(config: Config, problems: Problems) -> None:
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


def _check_package(config: Config, problems: Problems) -> None:
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


_ONLY = {
    "context_parallel_size": (1, "context parallelism was not tried with --deepspeed"),
    "optimizer_cpu_offload": (False, "DeepSpeed has --cpu-optimizer for that"),
    "decoupled_lr": (None, "--deepspeed has one learning rate for all parameters"),
    "use_mup": (False, "--deepspeed has one learning rate for all parameters"),
    "apply_wd_to_qk_layernorm": (False, "--deepspeed decays no parameter with one dimension"),
    "overlap_param_gather": (False, "--deepspeed gathers weights after the update"),
    "init_model_with_meta_device": (False, "DeepSpeed copies the weights when its optimizer is built"),
}
"""By argument of Megatron-LM, the only value that works with DeepSpeed's optimizer, and the reason."""


def refuse_unsupported(config: Config, arguments: Any) -> None:
    """Raises ``ConfigError`` with all flags that cannot be combined with ``--deepspeed``, if that is given; pure."""
    problems = Problems()
    problems.check(check_deepspeed, config, problems)
    if config.zero.deepspeed:
        problems.refuse(
            config.regularization.grad_norm == "stock",
            "--grad-norm stock is megatron-core's norm, which --deepspeed cannot compute. Fix: drop it",
            code="grad-norm-unsupported",
        )
        for option, reason in other_values(arguments, _ONLY):
            problems.refuse(
                True, f"{option}: {reason}. Fix: drop it, or drop --deepspeed", code="deepspeed-excludes-flag"
            )
    problems.raise_found()


def complete(args: Any, given: Mapping[str, Any]) -> None:
    """Sets the global batch size that ``--gradient-accumulation-steps`` implies, also at ZeRO stage 0.

    Args:
        args: Megatron-LM's arguments, not validated.
        given: values of the command line, by name.

    Raises:
        ConfigError: the steps are not a valid number of micro batches, or contradict the global batch.
    """
    if not given.get("deepspeed") or args.micro_batch_size is None:
        return
    flag = all_flags()["gradient_accumulation_steps"]
    steps: Any = convert_value(flag, given.get(flag.name))
    if steps is None or args.step_batch_size_schedule:
        return
    flag.check(steps)
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    wanted = steps * args.micro_batch_size * max(args.world_size // model, 1)
    refuse(
        args.global_batch_size not in (None, wanted),
        f"--gradient-accumulation-steps {steps} contradicts --global-batch-size {args.global_batch_size}. Fix: "
        f"give --global-batch-size {wanted}, or drop --gradient-accumulation-steps",
        code="batch-not-divisible",
    )
    args.global_batch_size = wanted


def set_up(
    config: Config, container: Any, model_type: Any, provider: Callable[..., Any] | None, groups: Any
) -> tuple[list[DistributedDataParallel], ZeroOptimizer, OptimizerParamScheduler]:
    """Builds model, optimizer and schedule, in the place of Megatron-LM's ``setup_model_and_optimizer``.

    Args:
        config: the flags in force.
        container: Megatron-LM's configuration; it describes the model, unless ``provider`` builds it.
        model_type: Megatron-LM's kind of model.
        provider: builds a model chunk.
        groups: Megatron-LM's collection of process groups.

    Raises:
        UnknownReleaseError: DeepSpeed lacks a private interface that is used here.
    """
    load()
    private_interfaces.require("fragments", "deepspeed")
    args, bare = get_args(), bare_chunks(container, model_type, provider, groups)
    (chunk,) = (ZeroChunk(get_model_config(one), one) for one in bare)  # no virtual stages
    core_config, _ = cast(Any, training.get_megatron_optimizer_config(args))
    optimizer = build_zero_optimizer(config, chunk, core_config)
    args.iteration = args.num_floating_point_operations_so_far = 0
    return cast(Any, [chunk]), optimizer, training.get_optimizer_param_scheduler(optimizer)
