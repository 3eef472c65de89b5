"""Converts Megatron-LM's arguments and our own flags to the configuration that the loop reads.

Only the groups of our own flags are checked, since Megatron-LM checks its arguments.  A launcher uses this module, so
it imports Megatron-LM and torch only where needed.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from megatron.pretraining.config import Config
from megatron.pretraining.config.flag import ConfigError, Problems, convert_value, refuse
from megatron.pretraining.config.groups import all_flags, converted, group_classes
from megatron.pretraining.config.together import check_own_flags
from megatron.pretraining.entry.exclusions import (
    refuse_evaluation_batches,
    refuse_with_deepspeed,
    refuse_with_elastic,
)
from megatron.pretraining.entry.limits import (
    check_contradictions,
    check_divisions,
    check_router,
    check_schedule,
    check_virtual_stages,
)
from megatron.pretraining.entry.optimizers import refuse_sharded_sgd
from megatron.pretraining.entry.own_flags import OWN_PROGRAM
from moc.files.decode import shorten_middle

_DEFAULTS = {"grad_norm": "stock", "initialization": "stock", "correct": "none"}
"""Defaults for a user's script that differ from our program's, for the same bits as Megatron-LM's loop."""
_RENAMED = {
    "fp8_format": ("moc_fp8", "fp8"),
    "exp_avg_dtype": ("moc_exp_avg_dtype", "exp_avg_dtype"),
    "exp_avg_sq_dtype": ("moc_exp_avg_sq_dtype", "exp_avg_sq_dtype"),
    "norm_epsilon": ("layernorm_epsilon",),
}
"""Arguments by our name of a value; the first one that is given is used."""
_EXCLUDING = refuse_with_deepspeed, refuse_with_elastic, refuse_sharded_sgd
_FORMATS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


@dataclasses.dataclass(frozen=True)
class MegatronConfig(Config):
    """The flags in force in a run of Megatron-LM's program.

    Attributes:
        arguments: Megatron-LM's arguments, which hold all values that have no group here.
    """

    arguments: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Virtual stages of each worker, as Megatron-LM derives them; None before."""
        return getattr(self.arguments, "virtual_pipeline_model_parallel_size", None)

    @property
    def scheduled_batch_sizes(self) -> tuple[int, ...]:
        """Sizes of the global batch in the steps of ``--step-batch-size-schedule``, as Megatron-LM reads it.

        Raises:
            ConfigError: it is not a schedule.
        """
        schedule = getattr(self.arguments, "step_batch_size_schedule", None)
        if schedule is None:
            return ()
        try:
            steps = (
                _batch_calculators()
                .StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, schedule, self.arguments.seq_length)
                .schedule
            )
        except (AssertionError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"--step-batch-size-schedule cannot be read ({shorten_middle(str(error))}). Fix: write pairs of a "
                "number of tokens and a batch size, such as 0:256,1B:512",
                code="value-unreadable",
            ) from None
        return tuple(size for _, size in steps)

    def replace(self, group: str, **changes: object) -> MegatronConfig:
        """Returns a copy with other values in one group; our own flags are checked again.

        Raises:
            AttributeError: the group has no such field.
            ConfigError: the result cannot work.
        """
        old, flags = getattr(self, group), all_flags()
        for name, value in changes.items():
            getattr(old, name)
            changes[name] = convert_value(flags[name], value) if name in flags else value
        return _checked(dataclasses.replace(self, **{group: dataclasses.replace(old, **changes)}))


def config_of(arguments: Namespace, own: Mapping[str, object]) -> MegatronConfig:
    """Returns the configuration of a run.

    Args:
        arguments: Megatron-LM's, validated.
        own: values of our flags that were given, by name.

    Raises:
        ConfigError: a value of our flags, or a combination with others, cannot work.
    """
    problems = Problems()
    config = unchecked_config(arguments, own, problems)
    problems.raise_found()
    return _checked(config)


def unchecked_config(arguments: Namespace, own: Mapping[str, object], problems: Problems) -> MegatronConfig:
    """Returns the configuration as :func:`config_of`, of arguments that are only parsed.

    Values that Megatron-LM's validation derives are missing, and groups of flags are not compared with each other.
    Adds the problems of our flags and of their groups; values that cannot work are missing.
    """
    flags, own_values = all_flags(), converted(own, problems)
    groups: dict[str, Any] = {}
    stock = {} if getattr(arguments, OWN_PROGRAM, False) else dict(_DEFAULTS)
    if own_values.get("elastic"):
        stock = {name: stock[name] for name in stock if name == "correct"}  # independent of the number of workers
    if own_values.get("deepspeed"):
        stock.pop("grad_norm", None)  # DeepSpeed's optimizer has no norm of Megatron-LM's
    for name, kind in group_classes().items():
        values = {
            field.name: own_values.get(field.name, stock.get(field.name, flags[field.name].default))
            if field.name in flags
            else _value(arguments, field.name)
            for field in dataclasses.fields(kind)
        }
        groups[name] = kind.of_values(values, problems)
    return MegatronConfig(**groups, given=dict(own), arguments=arguments)


def check_parsed(arguments: Namespace, own: Mapping[str, object], problems: Problems) -> MegatronConfig:
    """Adds all problems that do not depend on the number of workers and need no validated arguments.

    Returns:
        The configuration, whose arguments are only parsed; values that cannot work are missing.
    """
    for check in (check_divisions, check_virtual_stages, check_contradictions, check_schedule, check_router):
        problems.check(check, arguments)
    complete = Namespace(**vars(arguments))
    if complete.expert_tensor_parallel_size is None:  # as Megatron-LM, and elastic training
        complete.expert_tensor_parallel_size = 1 if own.get("elastic") else complete.tensor_model_parallel_size
    config = unchecked_config(complete, own, problems)
    problems.check(lambda: config.scheduled_batch_sizes)
    problems.check(check_own_flags, config)
    problems.check(_check_initialization, config)
    for check in (*_EXCLUDING, refuse_evaluation_batches):
        problems.check(check, config, complete)
    return config


@functools.cache
def _batch_calculators() -> Any:
    """Returns megatron-core's module of batch sizes, loaded as a single file, since its package imports torch."""
    directories = import_module("megatron").__path__
    files = (Path(directory, "core", "num_microbatches_calculator.py") for directory in directories)
    spec: Any = spec_from_file_location("moc_batch_calculators", next(file for file in files if file.is_file()))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(arguments: Namespace) -> dict[str, Any]:
    """Returns Megatron-LM's arguments as values of JSON; other values are left out."""
    values = {}
    for name, value in vars(arguments).items():
        plain = _plain(value)
        try:
            values[name] = json.loads(json.dumps(plain, allow_nan=False))
        except (TypeError, ValueError):
            continue
    return values


def _value(arguments: Namespace, name: str) -> object:
    values = (getattr(arguments, alias, None) for alias in _RENAMED.get(name, (name,)))
    return _plain(next((value for value in values if value is not None), None))


def _plain(value: Any) -> Any:
    if type(value).__name__ == "dtype":  # torch's
        return _FORMATS.get(str(value), str(value))
    return value.name if isinstance(value, enum.Enum) else value


def _checked(config: MegatronConfig) -> MegatronConfig:
    _check_initialization(config)
    check_own_flags(config)
    for check in _EXCLUDING:
        check(config, config.arguments)
    return config


def _check_initialization(config: MegatronConfig) -> None:
    refuse(
        config.rng.initialization == "exact" and getattr(config.arguments, "init_model_with_meta_device", False),
        "--initialization exact needs weights in memory, and --init-model-with-meta-device builds them later. Fix: "
        "drop one of them",
        code="flags-exclude-each-other",
    )
