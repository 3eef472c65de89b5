"""Translates DeepSpeed's JSON configuration into flags, and refuses unsupported keys with a remedy.

There are five kinds of keys:

* ``_SUPPORTED`` keys set a flag.
* ``_WITHOUT_EFFECT`` keys are ignored by DeepSpeed at ZeRO stages 1 and 2.
* ``_IGNORED`` keys change no result.
* ``_FIXED`` keys have one accepted value, which already applies.
* ``_REPLACED`` keys are replaced by another flag.

A key that is off (false, null, 0, ``none``, ``enabled: false``) is never refused.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from megatron.pretraining.config.flag import ConfigError, Problems, dashed, refuse
from moc.files.decode import short_repr, shorten
from moc.files.safe_directory import MAX_CONFIG_BYTES, open_user_file

AUTO = "auto"
"""A value that leaves the decision to the flags."""


class Setting(NamedTuple):
    """A flag's value in a ds_config.

    Attributes:
        flag: the flag's field.
        key: the key that sets it, such as ``zero_optimization.stage``.
        yields: the command line may override it.
    """

    flag: str
    value: object
    key: str
    yields: bool = False


class _SupportedKey(NamedTuple):
    flag: str
    read: Callable[[Any], object] = lambda value: value
    yields: bool = False


_ADAMS = ("adam", "adamw", "fusedadam", "deepspeedcpuadam")
_FORMATS = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "fp32": "fp32", "fp16": "fp16", "bf16": "bf16",
            "bfp16": "bf16"}  # fmt: skip


def _adam(value: object) -> str:
    if str(value).lower() not in _ADAMS:
        raise ConfigError(
            f"{shorten(value)} is not supported. Fix: choose AdamW, or drop the section for --optimizer",
            code="ds-config-value-unsupported",
        )
    return "adam"


def _device(value: object) -> bool:
    if value not in ("none", "cpu", None):
        raise ConfigError(
            f"{shorten(value)} is not supported. Fix: choose cpu (--cpu-optimizer) or none",
            code="ds-config-value-unsupported",
        )
    return value == "cpu"


def _format(value: object) -> str:
    if str(value) not in _FORMATS:
        raise ConfigError(
            f"{shorten(value)} is not one of fp32, bf16, fp16. Fix: choose one", code="ds-config-value-unsupported"
        )
    return _FORMATS[str(value)]


_SUPPORTED = {
    "train_batch_size": _SupportedKey("global_batch_size"),
    "train_micro_batch_size_per_gpu": _SupportedKey("micro_batch_size"),
    "gradient_accumulation_steps": _SupportedKey("gradient_accumulation_steps"),
    "gradient_clipping": _SupportedKey("clip_grad", float),
    "steps_per_print": _SupportedKey("log_interval", int, yields=True),  # Megatron-DeepSpeed has both
    "bf16.enabled": _SupportedKey("bf16"),
    "bfloat16.enabled": _SupportedKey("bf16"),
    "fp16.enabled": _SupportedKey("fp16"),
    "fp16.loss_scale": _SupportedKey("loss_scale", lambda value: value or None),
    "fp16.initial_scale_power": _SupportedKey("initial_loss_scale", lambda value: 2.0 ** float(value)),
    "fp16.loss_scale_window": _SupportedKey("loss_scale_window", float),
    "fp16.hysteresis": _SupportedKey("hysteresis"),
    "fp16.min_loss_scale": _SupportedKey("min_loss_scale", float),
    "optimizer.type": _SupportedKey("optimizer", _adam),
    "optimizer.params.lr": _SupportedKey("lr", float),
    "optimizer.params.eps": _SupportedKey("adam_eps", float),
    "optimizer.params.weight_decay": _SupportedKey("weight_decay", float),
    "zero_optimization.stage": _SupportedKey("zero_stage"),
    "zero_optimization.reduce_bucket_size": _SupportedKey("zero_reduce_bucket_size"),
    "zero_optimization.allgather_bucket_size": _SupportedKey("zero_allgather_bucket_size"),
    "zero_optimization.round_robin_gradients": _SupportedKey("zero_round_robin_gradients"),
    "zero_optimization.use_multi_rank_bucket_allreduce": _SupportedKey("zero_multi_rank_bucket_allreduce"),
    "zero_optimization.cpu_offload": _SupportedKey("cpu_optimizer"),
    "zero_optimization.offload_optimizer.device": _SupportedKey("cpu_optimizer", _device),
    "zero_optimization.offload_optimizer.pin_memory": _SupportedKey("use_pin_memory"),
    "communication_data_type": _SupportedKey("zero_communication_dtype", _format),
    "data_types.grad_accum_dtype": _SupportedKey("zero_grad_accum_dtype", _format),
}

_PAIRS = {"optimizer.params.betas": ("adam_beta1", "adam_beta2")}

_SECTIONS = ("bf16", "bfloat16", "fp16", "optimizer", "optimizer.params", "zero_optimization",
             "zero_optimization.offload_optimizer", "data_types")  # fmt: skip

_WITHOUT_EFFECT = {  # at ZeRO stages 1 and 2
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio", "optimizer.legacy_fusion",
    "optimizer.params.torch_adam", "log_level", "seq_parallel_communication_data_type",
    *(f"zero_optimization.{key}" for key in (
        "allgather_partitions", "load_from_fp32_weights", "ignore_unused_parameters", "sub_group_size", "legacy_stage1",
        "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
        "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
        "stage3_gather_fp16_weights_on_model_save", "memory_efficient_linear", "override_module_apply",
        "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_gather_16bit_weights_on_model_save",
        "stage3_module_granularity_threshold", "leaf_module", "log_trace_cache_warnings")),
    *(f"zero_optimization.offload_optimizer.{key}" for key in (
        "buffer_count", "fast_init", "nvme_path", "cpuadam_cores_perc")),
}  # fmt: skip

_FIXED = {  # accepted value, and the remedy for others
    "gradient_predivide_factor": (1.0, "set 1.0, since gradients are averaged after their sum"),
    "bf16.check_grad_overflow": (True, "drop it, since the commit all-reduce of each iteration looks at all gradients"),
    "optimizer.params.adam_w_mode": (True, "set true, since weight decay is decoupled (AdamW)"),
    "optimizer.params.bias_correction": (True, "set true, since Adam's moments are corrected"),
    "gradient_allreduce_op": ("mean", "set mean, since gradients are averaged"),
    "managed_gradient_accumulation": (True, "set true, since micro batches are accumulated"),
    "zero_optimization.contiguous_gradients": (True, "set true, since experts need contiguous gradients"),
    "zero_optimization.reduce_scatter": (True, "set true, since experts need it"),
    "zero_optimization.compute_grad_norm": (True, "set true, since the commit all-reduce of each iteration needs it"),
    "zero_optimization.overlap_comm": (False, "set false, since it was not tried on GPUs yet"),
    "zero_optimization.zero_hpz_partition_size": (1, "set 1, since it is of stage 3"),
    "zero_optimization.offload_optimizer.ratio": (1.0, "set 1.0, since all optimizer state is offloaded"),
    "zero_optimization.offload_param": (None, "drop it, since it is of stage 3"),
    "zero_optimization.cpu_offload_param": (False, "drop it, since it is of stage 3"),
    "zero_optimization.zenflow": (None, "drop it, since a recovery with late updates would not be exact"),
    "sequence_parallel_size": (1, "choose --tensor-model-parallel-size with --sequence-parallel"),
}

_TIMES = "--timing-log-level 2 logs times"
_IGNORED = {
    "wall_clock_breakdown": _TIMES,
    "comms_logger": _TIMES,
    "flops_profiler": "MFU and tokens/s are logged",
    "memory_breakdown": "--log-memory-interval logs memory",
    "dump_state": "--print-config prints the configuration",
    "prescale_gradients": "gradients are averaged after their sum, which changes only rounding",
    "elastic_checkpoint": "checkpoints load in any layout",
    "zero_optimization.elastic_checkpoint": "checkpoints load in any layout",
}
"""Keys that change no result, with the replacement or the reason."""

_REPLACED = {
    "scheduler": "choose --lr-decay-style, --lr-warmup-iters and --min-lr",
    "tensorboard": "choose --tensorboard-dir",
    "wandb": "choose --tensorboard-dir, or read events.jsonl of --log-dir",
    "csv_monitor": "read events.jsonl of --log-dir",
    "comet": "choose --tensorboard-dir, or read events.jsonl of --log-dir",
    "monitor_config": "choose --tensorboard-dir",
    "activation_checkpointing": "choose --recompute-granularity",
    "checkpoint": "choose --save, or --ckpt-policy; checkpoints load in any layout",
    "load_universal_checkpoint": "drop it: checkpoints load in any layout",
    "nebula": "choose --ckpt-policy, which saves in the background",
    "datastates_ckpt": "choose --ckpt-policy, which saves in the background",
    "pipeline": "choose --pipeline-model-parallel-size",
    "tensor_parallel": "choose --tensor-model-parallel-size",
    "expert_parallel": "choose --expert-model-parallel-size",
    "use_data_before_expert_parallelism": "drop it: the order of ranks is Megatron's",
    "sparse_gradients": "drop it: all gradients are dense",
    "sparse_attention": "choose --attention-backend",
    "amp": "choose --bf16 or --fp16",
    "torch_autocast": "choose --bf16 or --fp16",
    "elasticity": "restart with other numbers of workers: checkpoints load in any layout",
    "autotuning": "choose the batch sizes by hand",
    "compression_training": "drop it",
    "curriculum_learning": "drop it: sequences have one length",
    "data_efficiency": "drop it: samples are read in Megatron's order",
    "progressive_layer_drop": "drop it: all layers compute",
    "eigenvalue": "drop it",
    "quantize_training": "choose --fp8-format",
    "hybrid_engine": "drop it: this program trains only",
    "compile": "drop it",
    "dataloader_drop_last": "drop it: the last batch is always complete",
    "disable_allgather": "drop it",
    "zero_optimization.zero_quantized_weights": "drop it: it is of stage 3",
    "zero_optimization.zero_quantized_nontrainable_weights": "drop it: it is of stage 3",
    "zero_optimization.zero_quantized_gradients": "choose communication_data_type bf16",
    "zero_optimization.parameter_alignment": "drop it",
    "zero_optimization.offload_optimizer.pipeline_read": "drop it: it is of NVMe",
    "zero_optimization.offload_optimizer.pipeline_write": "drop it: it is of NVMe",
    "zero_optimization.offload_optimizer.super_offload": "drop it: it is of stage 3",
    "fp16.auto_cast": "drop it: inputs are integers",
    "fp16.consecutive_hysteresis": "drop it: hysteresis counts as in Megatron-LM",
    "fp16.fp16_master_weights_and_grads": "drop it: masters are in fp32",
    "bf16.bf16_master_weights_and_grads": "drop it: masters are in fp32",
    "bf16.bf16_optimizer_states": "choose --exp-avg-dtype and --exp-avg-sq-dtype without --deepspeed",
    "bf16.immediate_grad_update": "drop it",
}


def settings_in(path: str) -> tuple[Setting, ...]:
    """Returns the flags that a ds_config file sets.

    Raises:
        ConfigError: the file cannot be read, or has keys that no flag can express; names all of them.
    """
    problems = Problems()
    try:
        settings = tuple(flags_of_section(_read(path), path, problems))
    except RecursionError:
        raise ConfigError(
            f"--deepspeed-config {path} is nested too deeply. Fix: correct it", code="ds-config-unreadable"
        ) from None
    problems.raise_found()
    return settings


def ignored_in(path: str) -> list[tuple[str, str]]:
    """Returns the keys of a ds_config that are ignored although they are on, each with the reason.

    Raises:
        ConfigError: the file cannot be read.
    """
    content = _read(path)
    nested = content.get("zero_optimization")
    inner = {f"zero_optimization.{key}": value for key, value in nested.items()} if isinstance(nested, Mapping) else {}
    return [
        (key, _IGNORED[key]) for key, value in (content | inner).items() if key in _IGNORED and not _is_off(None, value)
    ]


def _read(path: str) -> dict[str, Any]:
    try:
        with open(open_user_file(path, MAX_CONFIG_BYTES), encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=functools.partial(_unique_keys, path))
    except OSError as error:
        raise ConfigError(
            f"--deepspeed-config {path} cannot be read ({error.strerror}). Fix: correct the path",
            code="ds-config-unreadable",
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--deepspeed-config {path} is not JSON ({error}). Fix: correct it", code="ds-config-unreadable"
        ) from None
    refuse(
        not isinstance(content, dict),
        f"--deepspeed-config {path} does not hold keys and values. Fix: correct it",
        code="ds-config-unreadable",
    )
    return content


def flags_of_section(content: Mapping[str, Any], path: str, problems: Problems, section: str = "") -> Iterator[Setting]:
    """Yields the flags that a ds_config or its section sets; adds a problem for each refused key."""
    for name, value in content.items():
        key = f"{section}{name}"
        if key in _SECTIONS and isinstance(value, Mapping):
            yield from flags_of_section(_active_keys(value), path, problems, f"{key}.")
        elif value == AUTO and (key in _SUPPORTED or key in _PAIRS):
            continue
        elif key in _SUPPORTED:
            try:
                yield _setting(key, value, path)
            except ConfigError as error:
                problems.found.append(error)
        elif key in _PAIRS:
            try:
                yield from (Setting(flag, float(item), key) for flag, item in zip(_PAIRS[key], value, strict=True))
            except (TypeError, ValueError, OverflowError):
                problems.refuse(
                    True, f"{key} in {path} is not two numbers. Fix: correct it", code="ds-config-value-invalid"
                )
        elif key in _FIXED:
            only, remedy = _FIXED[key]
            problems.refuse(
                value not in (only, AUTO) and not _is_off(only, value),
                f"{_unsupported_key(key, value, path)}. Fix: {remedy}",
                code="ds-config-key-unsupported",
            )
        elif not _is_off(None, value) and key not in _WITHOUT_EFFECT and key not in _IGNORED:
            remedy = _REPLACED.get(key, "drop it, since this program does not know the key")
            problems.refuse(
                True, f"{_unsupported_key(key, value, path)}. Fix: {remedy}", code="ds-config-key-unsupported"
            )


def agree(
    explicit: Mapping[str, object], settings: tuple[Setting, ...], same_value: Callable[[str, object, object], bool]
) -> dict[str, object]:
    """Returns the flags that a ds_config adds to the given ones.

    Args:
        explicit: values of flags by field.
        settings: flags that the ds_config sets.
        same_value: whether two values of a flag mean the same.

    Raises:
        ConfigError: given flags differ from the ds_config, or keys contradict each other.
    """
    added: dict[str, Setting] = {}
    problems = Problems()
    for setting in settings:
        name, value = setting.flag, setting.value
        if name in explicit:
            problems.refuse(
                not setting.yields and not same_value(name, explicit[name], value),
                f"{dashed(name)} {explicit[name]} contradicts {setting.key} of the --deepspeed-config, which is "
                f'{shorten(value)}. Fix: change one of them, or set the key to "auto"',
                code="ds-config-contradicts-flag",
            )
        else:
            problems.refuse(
                name in added and not same_value(name, added[name].value, value),
                f"{setting.key} and {added.get(name, setting).key} of the --deepspeed-config contradict each other. "
                "Fix: drop one",
                code="ds-config-contradicts-itself",
            )
            added[name] = setting
    problems.raise_found()
    return {name: setting.value for name, setting in added.items()}


def _active_keys(section: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a section's contents; if it is switched off, only the switch."""
    for switch, off in (("enabled", (False,)), ("device", ("none", None))):
        if switch in section and section[switch] in off:
            return {switch: section[switch]}
    return section


def _setting(key: str, value: object, path: str) -> Setting:
    flag, read, yields = _SUPPORTED[key]
    try:
        return Setting(flag, read(value), key, yields)
    except ConfigError as error:
        raise ConfigError(f"{key} in {path}: {error}", code=error.code) from None
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{key} in {path} does not take {short_repr(value)}. Fix: correct it", code="ds-config-value-invalid"
        ) from None


def _is_off(only: object, value: object) -> bool:
    """Returns whether a value requests nothing; for a key with a required value, 0 and false do request something."""
    if only not in (None, False):
        return value is None
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(_is_off(None, item) for item in value.values())
    return not value or value == "none"


def _unsupported_key(key: str, value: object, path: str) -> str:
    value_text = "" if isinstance(value, (Mapping, list)) else f" {shorten(json.dumps(value))}"
    return f"{shorten(key)}{value_text} in {path} is not supported"


def _unique_keys(path: str, pairs: list[tuple[str, Any]]) -> dict:
    content = dict(pairs)
    names = [name for name, _ in pairs]
    duplicates = [name for name in content if names.count(name) > 1]
    refuse(
        duplicates,
        f"--deepspeed-config {path} gives {', '.join(duplicates)} twice. Fix: drop one",
        code="ds-config-contradicts-itself",
    )
    return content
