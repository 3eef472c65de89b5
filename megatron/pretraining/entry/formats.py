"""8- and 16-bit formats without Transformer Engine: ``--fp8-format``, ``--exp-avg-dtype`` and ``--exp-avg-sq-dtype``.

megatron-core implements them with Transformer Engine only. With ``--transformer-impl local``, this module computes
matrix products in 8 bits. Without ``--use-precision-aware-optimizer``, its Adam stores moments in small formats
(:mod:`megatron.pretraining.engine.small_moments`).

Computes 8-bit matrix products with torch's own kernel, in megatron-core's local linear layers. A tensor is scaled by
its largest value just before the product, as in Transformer Engine's *tensorwise* recipe, which MoEvement uses
(section 5.7).  Products share no state, so checkpoints contain nothing more, and a replayed iteration is
bit-identical.  Weights and everything else stay in 16 bits.  A frozen operator computes the same product forward;
backward, it computes only the input gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule

from megatron.pretraining.config import ConfigError
from megatron.pretraining.engine.owned import members
from megatron.pretraining.engine.small_moments import SmallMomentsAdam
from megatron.pretraining.entry.limits import MOMENTS, check_formats

TILE = 16
"""Sizes in CUDA's 8-bit product must be multiples of this."""
LEAST = 1e-12
"""Lower limit of the largest value that a tensor is scaled by, so that an all-zero tensor stays finite."""
CAPABILITY = (8, 9)
"""First GPUs with 8-bit products: Ada and Hopper."""
_OF_VALUES = torch.float8_e4m3fn
_OF_GRADIENTS = {"e4m3": torch.float8_e4m3fn, "hybrid": torch.float8_e5m2}


class Scaled(NamedTuple):
    """8-bit matrix: ``values * scale``, with the scale in fp32, one element."""

    values: torch.Tensor
    scale: torch.Tensor

    def t(self) -> Scaled:
        """Returns the transposed matrix."""
        return Scaled(self.values.t(), self.scale)


def scaled(matrix: torch.Tensor, dtype: torch.dtype) -> Scaled:
    """Rounds a matrix to 8 bits, scaling its largest value to the format's; non-finite values stay non-finite."""
    largest = torch.finfo(dtype).max
    scale = matrix.abs().amax().float().clamp(min=LEAST) / largest
    return Scaled((matrix.float() / scale).clamp(-largest, largest).to(dtype), scale)


def product(a: Scaled, b: Scaled, dtype: torch.dtype, quick: bool = False) -> torch.Tensor:
    """Computes ``a @ b`` of ``[n, k]`` and ``[k, m]``, k and m multiples of 16, in 16 or 32 bits.

    ``quick`` accumulates in the precision of Hopper's tensor cores, which suffices if the result is no gradient.
    """
    rows, columns = a.values.contiguous(), b.values.t().contiguous().t()  # the memory layout that CUDA requires
    with _without_onednn():
        scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]  # torch has no public equivalent
        return scaled_mm(rows, columns, scale_a=a.scale, scale_b=b.scale, out_dtype=dtype, use_fast_accum=quick)


@contextlib.contextmanager
def _without_onednn():
    """Disables oneDNN: on a CPU without such products it takes 500 times as long as torch; a GPU is unaffected."""
    onednn = torch.backends.mkldnn
    before, onednn.enabled = onednn.enabled, False
    try:
        yield
    finally:
        onednn.enabled = before


class _Linear(torch.autograd.Function):
    """Computes ``inputs @ weight.T`` and its gradients by 8-bit products."""

    @staticmethod
    def forward(ctx, inputs: torch.Tensor, weight: torch.Tensor, gradient_dtype: torch.dtype) -> torch.Tensor:
        """Multiplies ``[..., k]`` and ``[m, k]`` to ``[..., m]``, in the dtype of the inputs."""
        rows = scaled(_tiled(inputs), _OF_VALUES)
        # save the existing 16-bit weight, instead of 8 more bits per element for each micro batch in flight
        ctx.save_for_backward(weight, *(rows if ctx.needs_input_grad[1] else ()))
        ctx.gradient_dtype, ctx.shape = gradient_dtype, inputs.shape
        matrix = product(rows, scaled(weight, _OF_VALUES).t(), inputs.dtype, quick=True)
        return _untiled(matrix, inputs.shape)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        """Returns the gradients of inputs and weight, if they are required."""
        weight, *rows = ctx.saved_tensors
        grad_output = scaled(_tiled(gradient), ctx.gradient_dtype)
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            matrix = product(grad_output, scaled(weight, _OF_VALUES), gradient.dtype)
            grad_input = _untiled(matrix, ctx.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = product(grad_output.t(), Scaled(*rows), weight.dtype)
        return grad_input, grad_weight, None


def _tiled(tensor: torch.Tensor) -> torch.Tensor:
    """Pads a matrix with zero rows to a multiple of 16: an expert receives any number of tokens, or none."""
    rows = tensor.flatten(0, -2)
    missing = -len(rows) % TILE if len(rows) else TILE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _untiled(matrix: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return matrix[: shape[:-1].numel()].view(*shape[:-1], matrix.shape[-1])


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    fp8_format: str,
    allreduce_dgrad: bool = False,
    sequence_parallel: bool = False,
    tp_group: torch.distributed.ProcessGroup | None = None,
    **ignored,
) -> torch.Tensor:
    """Replaces the computation of megatron-core's parallel linear layers, in 8 bits.

    Args:
        input: ``[sequence, batch, k]`` or ``[tokens, k]``, in 16 bits.
        weight: ``[m, k]``.
        bias: ``[m]``.
        fp8_format: ``e4m3`` for all tensors, or ``hybrid``, with gradients in e5m2.
        allreduce_dgrad: sum the gradient of the input over the tensor-parallel workers.
        sequence_parallel: each of these workers holds a part of the sequence; gather it forward, and scatter backward.
        tp_group: the tensor-parallel workers.
        ignored: options for weight gradients, which do not apply here.
    """
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    outputs = _Linear.apply(input, weight, _OF_GRADIENTS[fp8_format])
    return outputs if bias is None else outputs + bias


def multiply_in_8_bits(chunk: MegatronModule, fp8_format: str) -> None:
    """Makes the linear layers of attention and feed-forward parts, including experts, compute in 8 bits.

    Routers, embeddings and the output layer stay in 16 bits, as with Transformer Engine.

    Raises:
        ConfigError: a weight's sides are not multiples of 16, or the GPU has no 8-bit products.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name()} does not multiply in 8 bits, which takes compute capability 8.9. Fix: "
            "drop --fp8-format",
            code="fp8-unsupported",
        )
    for name, module in chunk.named_modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and not name.endswith("output_layer"):
            shape = () if module.weight is None else module.weight.shape
            if any(side % TILE for side in shape):
                raise ConfigError(
                    f"the weight of {name} is {' x '.join(map(str, shape))}, and products in 8 bits take multiples of "
                    f"{TILE}. Fix: change the sizes of the model or --tensor-model-parallel-size, or drop --fp8-format",
                    code="fp8-unsupported",
                )
            module._forward_impl = partial(linear, fp8_format=fp8_format)


_PRODUCTS = "moc_fp8"


def take_formats(args: Any) -> None:
    """Moves the formats that this project implements to arguments of its own, before Megatron-LM checks the others.

    Raises:
        ConfigError: the model or the optimizer cannot have these formats.
    """
    check_formats(args)
    if args.fp8 and args.transformer_impl == "local":
        setattr(args, _PRODUCTS, args.fp8)
        args.fp8 = None
    for name in MOMENTS if not args.use_precision_aware_optimizer else ():
        setattr(args, f"moc_{name}", getattr(args, name))
        setattr(args, name, "fp32")


def multiply_in_format(args: Any, chunks: Iterable[Any]) -> None:
    """Computes the matrix products of model chunks in 8 bits, if the arguments ask for it."""
    if format := getattr(args, _PRODUCTS, None):
        for chunk in chunks:
            multiply_in_8_bits(chunk, format)


def store_in_formats(args: Any, core: MegatronOptimizer) -> None:
    """Replaces Adam by one that stores moments in other formats, if the arguments ask for it."""
    formats = [getattr(args, f"moc_{name}", "fp32") for name in MOMENTS]
    if formats != ["fp32", "fp32"]:
        for member in members(core):
            member.optimizer = SmallMomentsAdam(member.optimizer.param_groups, *formats)
