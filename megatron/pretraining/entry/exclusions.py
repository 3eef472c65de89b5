"""Checks what ``--elastic`` and ``--deepspeed`` require of other flags.

A launcher refuses command lines by these checks, so this module imports neither Megatron-LM nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from typing import Any

from megatron.pretraining.config import Config
from megatron.pretraining.config.deepspeed import BEFORE, OLDEST, WANTED
from megatron.pretraining.config.flag import Problems, convert_value, refuse
from megatron.pretraining.config.groups import all_flags
from megatron.pretraining.process.core import unchecked


def _check_elastic(config: Config, problems: Problems) -> None:
    for check in (_check_training, _check_experts, _check_dispatch, _check_parallel, _check_snapshots):
        problems.check(check, config, problems)
    problems.refuse(
        "TORCHELASTIC_RUN_ID" in os.environ,
        "--elastic needs a launcher that keeps the workers that are left, and torchrun ends them. Fix: start the job "
        "with python -m moc.launch",
        code="elastic-under-torchrun",
    )


def _check_training(config: Config, problems: Problems) -> None:
    problems.refuse(
        not config.training.calculate_per_token_loss,
        "--elastic needs --calculate-per-token-loss, since gradients must not depend on the number of workers. Fix: "
        "add it",
        code="elastic-needs-flag",
    )
    problems.refuse(
        config.data.dataloader_type == "cyclic",
        "--elastic reads samples in an order that does not depend on the number of workers. Fix: drop "
        "--dataloader-type cyclic",
        code="elastic-excludes-flag",
    )


def _check_experts(config: Config, problems: Problems) -> None:
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


def _check_dispatch(config: Config, problems: Problems) -> None:
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


def _check_parallel(config: Config, problems: Problems) -> None:
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


def _check_snapshots(config: Config, problems: Problems) -> None:
    snapshot = config.snapshot
    problems.refuse(
        snapshot.upstream_logging,
        "--elastic does not replay single pipeline stages. Fix: drop --upstream-logging",
        code="elastic-excludes-flag",
    )


_WITH_ELASTIC = {
    "rampup_batch_size": (None, "the global batch has a constant size"),
    "step_batch_size_schedule": (None, "the global batch has a constant size"),
    "mtp_num_layers": (None, "multi-token prediction was not tried with --elastic"),
    "use_megatron_fsdp": (False, "gradients of replicas are summed by layer"),
    "use_torch_fsdp2": (False, "gradients of replicas are summed by layer"),
    "init_model_with_meta_device": (False, "weights are initialised by the numbers of experts when the model is built"),
    "optimizer_cpu_offload": (False, "blocks of optimizer state move between workers on the device"),
    "use_mup": (False, "optimizers of --elastic have no learning rates by width"),
    "ckpt_format": ("torch_dist", "other formats have the experts of one worker of each data-parallel group"),
}
"""By argument of Megatron-LM, the only value that works with elastic training, and the reason."""


def refuse_with_elastic(config: Config, arguments: Any) -> None:
    """Raises ``ConfigError`` with all flags that cannot be combined with ``--elastic``, if that is given.

    Args:
        config: the flags, whose values that Megatron-LM derives may be missing.
        arguments: Megatron-LM's arguments, which may be only parsed.
    """
    if not config.elastic.elastic:
        return
    problems = Problems()
    problems.refuse(
        config.training.global_batch_size is None and not arguments.step_batch_size_schedule,
        "--elastic needs --global-batch-size, which does not change with the number of workers. Fix: add it",
        code="elastic-needs-flag",
    )
    problems.check(_check_elastic, config, problems)
    problems.refuse(
        _has_virtual_stages(config, arguments),
        "--elastic works with plain pipeline schedules. Fix: drop --num-layers-per-virtual-pipeline-stage and "
        "--num-virtual-stages-per-pipeline-rank",
        code="elastic-excludes-flag",
    )
    for option, reason in _other_values(arguments, _WITH_ELASTIC):
        problems.refuse(True, f"{option}: {reason}. Fix: drop it, or drop --elastic", code="elastic-excludes-flag")
    problems.refuse(
        config.regularization.grad_norm == "stock",
        "--grad-norm stock is megatron-core's norm, which depends on the number of workers. Fix: drop it, or --elastic",
        code="grad-norm-unsupported",
    )
    problems.refuse(
        config.rng.initialization == "stock",
        "--initialization stock draws weights for each replica, and --elastic needs equal ones. Fix: drop one of them",
        code="initialization-unsupported",
    )
    kinds = arguments.moe_router_load_balancing_type
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        problems.refuse(
            kind in ("global_aux_loss", "quantile_balancing"),
            f"--moe-router-load-balancing-type {kind} depends on the number of workers, which --elastic changes. Fix: "
            "choose aux_loss or seq_aux_loss",
            code="elastic-excludes-flag",
        )
    problems.refuse(
        config.regularization.optimizer not in ("adam", "sgd"),
        f"--elastic can move only the state of Adam and SGD. Fix: drop --optimizer {config.regularization.optimizer}",
        code="elastic-excludes-flag",
    )
    problems.raise_found()


def complete_elastic(args: Any, given: Collection[str]) -> None:
    """Sets the dispatcher and unsharded experts, which elastic layers replace, unless the arguments are given."""
    if "moe_token_dispatcher_type" not in given:
        args.moe_token_dispatcher_type = "alltoall"
    if "expert_tensor_parallel_size" not in given:
        args.expert_tensor_parallel_size = 1


def refuse_evaluation_batches(config: Config, arguments: Any) -> None:
    """Raises ``ConfigError`` if evaluation has batches of its own with ``--elastic``.

    Args:
        config: the flags.
        arguments: Megatron-LM's arguments as parsed; its check derives these sizes if they are not given.
    """
    problems = Problems()
    for name in ("eval_global_batch_size", "eval_micro_batch_size"):
        problems.refuse(
            config.elastic.elastic and getattr(arguments, name) is not None,
            f"--elastic evaluates with the batches of training. Fix: drop --{name.replace('_', '-')}",
            code="elastic-excludes-flag",
        )
    problems.raise_found()


def _check_deepspeed(config: Config, problems: Problems) -> None:
    for check in (_check_stages, _check_data_parallelism, _check_optimizer, check_package):
        problems.check(check, config, problems)


def _check_stages(config: Config, problems: Problems) -> None:
    pipeline = config.parallel.pipeline_model_parallel_size > 1
    problems.refuse(
        pipeline and config.zero.zero_stage == 2,
        "--zero-stage 2 reduces gradients after each micro batch, and cannot be combined with "
        "--pipeline-model-parallel-size greater than 1. Fix: choose --zero-stage 1",
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


def check_package(config: Config, problems: Problems) -> None:
    """Adds a problem if DeepSpeed is missing, or of another version than this project supports."""
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


_WITH_DEEPSPEED = {
    "context_parallel_size": (1, "context parallelism was not tried with --deepspeed"),
    "optimizer_cpu_offload": (False, "DeepSpeed has --cpu-optimizer for that"),
    "decoupled_lr": (None, "--deepspeed has one learning rate for all parameters"),
    "use_mup": (False, "--deepspeed has one learning rate for all parameters"),
    "apply_wd_to_qk_layernorm": (False, "--deepspeed decays no parameter with one dimension"),
    "overlap_param_gather": (False, "--deepspeed gathers weights after the update"),
    "init_model_with_meta_device": (False, "DeepSpeed copies the weights when its optimizer is built"),
}
"""By argument of Megatron-LM, the only value that works with DeepSpeed's optimizer, and the reason."""


def refuse_with_deepspeed(config: Config, arguments: Any) -> None:
    """Raises ``ConfigError`` as :func:`refuse_with_elastic`, for ``--deepspeed``."""
    if not config.zero.deepspeed:
        return
    problems = Problems()
    problems.check(_check_deepspeed, config, problems)
    problems.refuse(
        _has_virtual_stages(config, arguments),
        "--deepspeed does not know virtual pipeline stages. Fix: drop --num-virtual-stages-per-pipeline-rank and "
        "--num-layers-per-virtual-pipeline-stage",
        code="deepspeed-excludes-flag",
    )
    problems.refuse(
        config.regularization.grad_norm == "stock",
        "--grad-norm stock is megatron-core's norm, which --deepspeed cannot compute. Fix: drop it",
        code="grad-norm-unsupported",
    )
    for option, reason in _other_values(arguments, _WITH_DEEPSPEED):
        problems.refuse(True, f"{option}: {reason}. Fix: drop it, or drop --deepspeed", code="deepspeed-excludes-flag")
    problems.raise_found()


def complete_batch(args: Any, given: Mapping[str, Any], world_size: int) -> None:
    """Sets the global batch size that ``--gradient-accumulation-steps`` implies, also at ZeRO stage 0.

    Args:
        args: Megatron-LM's arguments, not validated.
        given: values of the command line, by name.
        world_size: workers of the job.

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
    wanted = steps * args.micro_batch_size * max(world_size // model, 1)
    refuse(
        args.global_batch_size not in (None, wanted),
        f"--gradient-accumulation-steps {steps} contradicts --global-batch-size {args.global_batch_size}. Fix: "
        f"give --global-batch-size {wanted}, or drop --gradient-accumulation-steps",
        code="batch-not-divisible",
    )
    args.global_batch_size = wanted


def _other_values(arguments: Any, only: Mapping[str, tuple[Any, str]]) -> Iterator[tuple[str, str]]:
    """Yields the options that have other values than a table permits, with the reasons.

    Args:
        arguments: Megatron-LM's arguments.
        only: by name of an argument, its only permitted value, and the reason; None is always permitted.
    """
    for name, (permitted, reason) in only.items():
        value = getattr(arguments, name, permitted)
        if value not in (permitted, None):
            yield f"--{name.replace('_', '-')} {value}", reason


def _has_virtual_stages(config: Config, arguments: Any) -> bool:
    """Returns whether stages are divided into virtual ones, as Megatron-LM derives it or, before, as the flags say."""
    layers, part = arguments.num_layers, arguments.num_layers_per_virtual_pipeline_stage
    return bool(
        config.virtual_pipeline_model_parallel_size
        or (arguments.num_virtual_stages_per_pipeline_rank or 1) > 1
        or (layers and part and part * arguments.pipeline_model_parallel_size < layers)
    )
