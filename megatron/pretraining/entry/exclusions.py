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
from megatron.pretraining.config.flag import Problems, convert_value, dashed, refuse
from megatron.pretraining.config.groups import all_flags
from megatron.pretraining.process.core import unchecked

_WITH_ELASTIC: Mapping[str, tuple[Collection, str]] = {
    "rampup_batch_size": ((), "the global batch has a constant size"),
    "step_batch_size_schedule": ((), "the global batch has a constant size"),
    "dataloader_type": (("single", "external"), "the order of samples must not depend on the number of workers"),
    "optimizer": (("adam", "sgd"), "only the state of Adam and SGD can move between workers"),
    "optimizer_cpu_offload": ((False,), "blocks of optimizer state move between workers on the device"),
    "overlap_grad_reduce": ((False,), "gradients of replicas are summed after the backward pass"),
    "overlap_param_gather": ((False,), "gradients of replicas are summed after the backward pass"),
    "use_megatron_fsdp": ((False,), "gradients of replicas are summed by layer"),
    "use_torch_fsdp2": ((False,), "gradients of replicas are summed by layer"),
    "expert_model_parallel_size": ((1,), "experts are placed by --elastic itself"),
    "expert_tensor_parallel_size": ((1,), "experts are placed completely"),
    "moe_grouped_gemm": ((False,), "experts are computed one by one, with different numbers of tokens"),
    "moe_token_dispatcher_type": (("alltoall",), "tokens have a dispatcher of their own"),
    "moe_permute_fusion": ((False,), "the dispatcher has no fused kernels"),
    "moe_pad_expert_input_to_capacity": ((False,), "tokens are sent without padding"),
    "moe_shared_expert_overlap": ((False,), "shared experts are not computed during the dispatch"),
    "mtp_num_layers": ((), "multi-token prediction was not tried with --elastic"),
    "init_model_with_meta_device": ((False,), "weights are initialised by expert number when the model is built"),
    "use_mup": ((False,), "optimizers of --elastic have no learning rates by width"),
    "ckpt_format": (("torch_dist",), "other formats have the experts of one worker of each data-parallel group"),
}
"""By argument of Megatron-LM, the only values that work with elastic training, and the reason."""


def _check_elastic(config: Config, problems: Problems) -> None:
    moe, everywhere, slots = config.moe, config.elastic.everywhere, config.elastic.elastic_slots
    problems.refuse(
        not config.training.calculate_per_token_loss,
        "--elastic needs --calculate-per-token-loss, since gradients must not depend on the number of workers. Fix: "
        "add it",
        code="elastic-needs-flag",
    )
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
        config.snapshot.upstream_logging,
        "--elastic does not replay single pipeline stages. Fix: drop --upstream-logging",
        code="elastic-excludes-flag",
    )
    problems.refuse(
        "TORCHELASTIC_RUN_ID" in os.environ,
        "--elastic needs a launcher that keeps the surviving workers, and torchrun ends them. Fix: start the job with "
        "python -m moc.launch",
        code="elastic-under-torchrun",
    )


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


_WITH_DEEPSPEED: Mapping[str, tuple[Collection, str]] = {
    "use_distributed_optimizer": ((False,), "DeepSpeed shards optimizer state itself, by --zero-stage"),
    "overlap_grad_reduce": ((False,), "DeepSpeed does not overlap reductions"),
    "overlap_param_gather": ((False,), "--deepspeed gathers weights after the update"),
    "ddp_bucket_size": ((0,), "DeepSpeed has --zero-reduce-bucket-size for that"),
    "optimizer": (("adam",), "other optimizers were not tried with --deepspeed"),
    "optimizer_cpu_offload": ((False,), "DeepSpeed has --cpu-optimizer for that"),
    "context_parallel_size": ((1,), "context parallelism was not tried with --deepspeed"),
    "decoupled_lr": ((), "--deepspeed has one learning rate for all parameters"),
    "use_mup": ((False,), "--deepspeed has one learning rate for all parameters"),
    "apply_wd_to_qk_layernorm": ((False,), "--deepspeed decays no parameter with one dimension"),
    "init_model_with_meta_device": ((False,), "DeepSpeed copies the weights when its optimizer is built"),
}
"""By argument of Megatron-LM, the only values that work with DeepSpeed's optimizer, and the reason."""


def _check_deepspeed(config: Config, problems: Problems) -> None:
    problems.refuse(
        config.parallel.pipeline_model_parallel_size > 1 and config.zero.zero_stage == 2,
        "--zero-stage 2 reduces gradients after each micro batch, and cannot be combined with "
        "--pipeline-model-parallel-size greater than 1. Fix: choose --zero-stage 1",
        code="deepspeed-excludes-flag",
    )
    problems.refuse(
        config.elastic.elastic,
        "--deepspeed reduces gradients among fixed groups of replicas. Fix: drop --elastic",
        code="deepspeed-excludes-flag",
    )
    problems.refuse(
        config.mixed_precision.moments not in (None, ("fp32", "fp32")),
        "--deepspeed keeps moments in fp32. Fix: drop --exp-avg-dtype and --exp-avg-sq-dtype",
        code="deepspeed-excludes-flag",
    )
    problems.refuse(
        config.mixed_precision.main_params_dtype != "fp32",
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


def refuse_with_deepspeed(config: Config, arguments: Any) -> None:
    """Raises ``ConfigError`` as :func:`refuse_with_elastic`, for ``--deepspeed``."""
    if not config.zero.deepspeed:
        return
    problems = Problems()
    problems.check(_check_deepspeed, config, problems)
    problems.check(check_package, config, problems)
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


def _other_values(arguments: Any, permitted: Mapping[str, tuple[Collection, str]]) -> Iterator[tuple[str, str]]:
    """Yields the options whose values a table does not permit, with the reasons; None is always permitted."""
    for name, (values, reason) in permitted.items():
        value = getattr(arguments, name, None)
        if value is not None and value not in values:
            yield dashed(name) if value is True else f"{dashed(name)} {value}", reason


def _has_virtual_stages(config: Config, arguments: Any) -> bool:
    """Returns whether stages are divided into virtual ones, as Megatron-LM derives it or, before, as the flags say."""
    layers, part = arguments.num_layers, arguments.num_layers_per_virtual_pipeline_stage
    return bool(
        config.virtual_pipeline_model_parallel_size
        or (arguments.num_virtual_stages_per_pipeline_rank or 1) > 1
        or (layers and part and part * arguments.pipeline_model_parallel_size < layers)
    )
