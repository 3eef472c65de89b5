"""Refuses Megatron-LM's optimizers that cannot work, by their arguments or after the model is built."""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron.pretraining.config import Config
from megatron.pretraining.config.flag import Problems, refuse

if TYPE_CHECKING:  # arguments are checked before torch is imported
    import torch
    from megatron.core.optimizer import MegatronOptimizer

_OF_CORE = ("adam", "sgd")
"""Optimizers that need no other package."""


def refuse_optimizers(arguments: Any) -> None:
    """Raises ``ConfigError`` with all problems of the optimizer's arguments; pure."""
    problems = Problems()
    _check_state(arguments, problems)
    if (kind := _value(arguments, "optimizer") or _OF_CORE[0]) not in _OF_CORE:
        problems.refuse(
            find_spec("emerging_optimizers") is None,
            f"--optimizer {kind} needs the package emerging-optimizers. Fix: pip install emerging-optimizers",
            code="package-missing",
        )
        problems.refuse(
            _value(arguments, "fp16"),
            f"--optimizer {kind} has no loss scale, which --fp16 needs. Fix: train in --bf16",
            code="optimizer-excludes-flag",
        )
    if _value(arguments, "use_layer_wise_distributed_optimizer"):
        _check_layers(arguments, problems)
    problems.raise_found()


def refuse_sharded_sgd(config: Config, arguments: Any) -> None:
    """Raises ``ConfigError`` if megatron-core would shard the state of SGD; ``--elastic`` shards it itself."""
    refuse(
        arguments.optimizer == "sgd"
        and config.parallel.use_distributed_optimizer
        and not (config.shards_by_blocks or _value(arguments, "optimizer_cpu_offload")),
        "--optimizer sgd excludes --use-distributed-optimizer, which shards the state of Adam. Fix: drop one of them",
        code="optimizer-excludes-flag",
    )


def refuse_built(optimizer: MegatronOptimizer, chunks: Iterable[torch.nn.Module]) -> None:
    """Raises ``ConfigError`` if Megatron-LM's update depends on more than the global gradient norm.

    A script's own configuration or model can demand this without any argument.
    """
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    own_norm = next(
        (norm_group for parameter in parameters if (norm_group := getattr(parameter, "grad_norm_group", None))), None
    )
    configs = [member.config for member in getattr(optimizer, "chained_optimizers", [optimizer])]
    threshold = min((getattr(config, "grad_norm_skip_threshold", math.inf) for config in configs), default=math.inf)
    problems = Problems()
    problems.refuse(
        own_norm is not None,
        f"the model has parameters with the grad_norm_group {own_norm!r}, whose gradients are clipped by a norm of "
        "their own, which the commit all-reduce does not carry. Fix: drop the attribute",
        code="optimizer-unsupported",
    )
    problems.refuse(
        math.isfinite(threshold),
        f"grad_norm_skip_threshold={threshold} of the optimizer's configuration skips updates, and a replay would not "
        "skip them. Fix: leave it at infinity",
        code="optimizer-unsupported",
    )
    problems.raise_found()


def _check_state(arguments: Any, problems: Problems) -> None:
    problems.refuse(
        _value(arguments, "mtp_detach_heads"),
        "--mtp-detach-heads clips the gradients of MTP heads by a norm of their own, which the commit all-reduce does "
        "not carry. Fix: drop it",
        code="optimizer-excludes-flag",
    )
    problems.refuse(
        _value(arguments, "use_precision_aware_optimizer") and not _value(arguments, "optimizer_cpu_offload"),
        "--use-precision-aware-optimizer keeps master weights inside of Transformer Engine's Adam, and snapshots "
        "cannot read them there. Fix: add --optimizer-cpu-offload, or drop it",
        code="optimizer-excludes-flag",
    )


def _check_layers(arguments: Any, problems: Problems) -> None:
    """Checks the layer-wise optimizer: ``dist_muon``, or one of its package with ``--use-distributed-optimizer``."""
    has_buffer_layout = _value(arguments, "use_layer_wise_param_layout")
    shards_experts = (_value(arguments, "expert_model_parallel_size") or 1) > 1
    problems.refuse(
        not _value(arguments, "bf16") and not _value(arguments, "fp16"),
        "the layer-wise optimizer of megatron-core (--use-distributed-optimizer, or dist_muon) works with --bf16 only. "
        "Fix: add --bf16, or drop --use-distributed-optimizer",
        code="optimizer-excludes-flag",
    )
    problems.refuse(
        _value(arguments, "overlap_param_gather") and not has_buffer_layout,
        "--overlap-param-gather with --no-use-layer-wise-param-layout overwrites the reduced gradients, which a "
        "recovery may apply. Fix: drop one of them",
        code="optimizer-excludes-flag",
    )
    # Megatron-LM's writer requests a file per rank from the optimizer; our checkpoints hold the state in fragments
    problems.refuse(
        _value(arguments, "ckpt_format") == "torch",
        "--ckpt-format torch cannot hold the state of the layer-wise optimizer of megatron-core "
        "(--use-distributed-optimizer, or dist_muon). Fix: choose --ckpt-format torch_dist",
        code="optimizer-excludes-flag",
    )
    problems.refuse(
        has_buffer_layout and shards_experts and _value(arguments, "add_bias_linear"),
        "the layer-wise optimizer of megatron-core has no place for the biases of experts. Fix: add "
        "--disable-bias-linear or --no-use-layer-wise-param-layout",
        code="optimizer-excludes-flag",
    )


def _value(arguments: Any, name: str) -> Any:
    return getattr(arguments, name, None)  # Megatron-LM derives some only if all others are valid
