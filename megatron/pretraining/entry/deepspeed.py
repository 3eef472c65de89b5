"""DeepSpeed's ZeRO optimizer for the models of Megatron-LM's scripts: ``--deepspeed``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config
from megatron.training import training

from megatron.pretraining.config import Config
from megatron.pretraining.engine.zero.build import build_zero_optimizer, load
from megatron.pretraining.engine.zero.chunk import ZeroChunk
from megatron.pretraining.engine.zero.optimizer import ZeroOptimizer
from megatron.pretraining.entry.stock import bare_chunks, get_args
from moc import private_interfaces


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
    (chunk,) = (ZeroChunk(get_model_config(module), module) for module in bare)  # no virtual stages
    core_config, _ = cast(Any, training.get_megatron_optimizer_config(args))
    optimizer = build_zero_optimizer(config, chunk, core_config)
    args.iteration = args.num_floating_point_operations_so_far = 0
    return cast(Any, [chunk]), optimizer, training.get_optimizer_param_scheduler(optimizer)
