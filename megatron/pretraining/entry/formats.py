"""8- and 16-bit formats without Transformer Engine: ``--fp8-format``, ``--exp-avg-dtype`` and ``--exp-avg-sq-dtype``.

megatron-core implements them with Transformer Engine only.  With ``--transformer-impl local``, this project computes
matrix products in 8 bits (:mod:`megatron.pretraining.model.fp8`); without ``--use-precision-aware-optimizer``, its Adam
stores moments in small formats (:mod:`megatron.pretraining.engine.small_moments`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron.core.optimizer import MegatronOptimizer

from megatron.pretraining.config.flag import Problems
from megatron.pretraining.engine.owned import members
from megatron.pretraining.engine.small_moments import SmallMomentsAdam
from megatron.pretraining.model import fp8

_MOMENTS = {"exp_avg_dtype": ("fp32", "fp16", "fp8"), "exp_avg_sq_dtype": ("fp32", "fp16")}
_PRODUCTS = "moc_fp8"


def take_formats(args: Any) -> None:
    """Moves the formats that this project implements to arguments of its own, before Megatron-LM checks the others.

    Raises:
        ConfigError: the model or the optimizer cannot have these formats.
    """
    problems = Problems()
    if args.fp8 and args.transformer_impl == "local":
        problems.refuse(
            args.num_experts and args.add_bias_linear,
            "--fp8-format without Transformer Engine has no biases of experts. Fix: add --disable-bias-linear, or drop "
            "--fp8-format",
            code="fp8-unsupported",
        )
        setattr(args, _PRODUCTS, args.fp8)
        args.fp8 = None
    for name, known in _MOMENTS.items() if not args.use_precision_aware_optimizer else ():
        format = getattr(args, name)
        setattr(args, f"moc_{name}", format)
        setattr(args, name, "fp32")
        problems.refuse(
            format not in known,
            f"--{name.replace('_', '-')} {format} needs Transformer Engine and --use-precision-aware-optimizer. Fix: "
            f"choose one of {', '.join(known)}",
            code="optimizer-excludes-flag",
        )
        problems.refuse(
            format != "fp32" and args.optimizer != "adam",
            f"--{name.replace('_', '-')} is for Adam, and --optimizer is {args.optimizer}. Fix: drop it",
            code="optimizer-excludes-flag",
        )
    problems.raise_found()


def multiply_in_format(args: Any, chunks: Iterable[Any]) -> None:
    """Computes the matrix products of model chunks in 8 bits, if the arguments ask for it."""
    if format := getattr(args, _PRODUCTS, None):
        for chunk in chunks:
            fp8.multiply_in_8_bits(chunk, format)


def store_in_formats(args: Any, core: MegatronOptimizer) -> None:
    """Replaces Adam by one that stores moments in other formats, if the arguments ask for it."""
    formats = [getattr(args, f"moc_{name}", "fp32") for name in _MOMENTS]
    if formats != ["fp32", "fp32"]:
        for member in members(core):
            member.optimizer = SmallMomentsAdam(member.optimizer.param_groups, *formats)
