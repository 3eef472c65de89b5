"""Matrix products in 8 bits by torch's own kernel, in megatron-core's local linear layers.

A tensor is scaled by its largest value just before it is multiplied, as Transformer Engine's recipe *tensorwise* does
it (MoEvement, section 5.7, trains so).  Nothing is remembered from one product to the next, so a checkpoint holds no
more than without, and an iteration that is computed again gives the same bits.  Weights and all else stay in 16 bits.
Operators that are frozen do the same product forward, and only that by the weight backward.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule

from megatron.pretraining.config import ConfigError

TILE = 16
"""What CUDA's product in 8 bits takes multiples of."""
LEAST = 1e-12
"""A tensor is scaled as if its largest value were at least that, so that one that is all zeros stays finite."""
CAPABILITY = (8, 9)
"""The first GPUs that multiply in 8 bits: Ada and Hopper."""
_OF_VALUES = torch.float8_e4m3fn
_OF_GRADIENTS = {"e4m3": torch.float8_e4m3fn, "hybrid": torch.float8_e5m2}


class Scaled(NamedTuple):
    """A matrix in 8 bits: ``values * scale``.

    Attributes:
        values: in one of the formats of 8 bits.
        scale: fp32, one element.
    """

    values: torch.Tensor
    scale: torch.Tensor

    def t(self) -> Scaled:
        """The same transposed."""
        return Scaled(self.values.t(), self.scale)


def scaled(matrix: torch.Tensor, dtype: torch.dtype) -> Scaled:
    """The matrix rounded to 8 bits, its largest value to the largest there is; not finite if it has such values."""
    most = torch.finfo(dtype).max
    scale = matrix.abs().amax().float().clamp(min=LEAST) / most
    return Scaled((matrix.float() / scale).clamp(-most, most).to(dtype), scale)


def product(a: Scaled, b: Scaled, dtype: torch.dtype, quick: bool = False) -> torch.Tensor:
    """``a @ b``.

    Args:
        a: ``[n, k]``.
        b: ``[k, m]``; k and m multiples of 16.
        dtype: of what comes out, of 16 bits or 32.
        quick: sums in the precision of a Hopper's tensor cores, which is enough where no gradient is made.
    """
    rows, columns = a.values.contiguous(), b.values.t().contiguous().t()  # as CUDA takes them
    with _without_onednn():
        scaled_mm = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]  # torch has no public one
        return scaled_mm(rows, columns, scale_a=a.scale, scale_b=b.scale, out_dtype=dtype, use_fast_accum=quick)


@contextlib.contextmanager
def _without_onednn():
    """Where the CPU has no such products, oneDNN takes 500 times as long as torch by itself; a GPU does not notice."""
    onednn = torch.backends.mkldnn
    before, onednn.enabled = onednn.enabled, False
    try:
        yield
    finally:
        onednn.enabled = before


class _Linear(torch.autograd.Function):
    """``inputs @ weight.T``, and its gradients, from matrices in 8 bits."""

    @staticmethod
    def forward(ctx, inputs: torch.Tensor, weight: torch.Tensor, of_gradients: torch.dtype) -> torch.Tensor:
        """``[..., k]`` and ``[m, k]`` to ``[..., m]``, in the dtype of the inputs."""
        rows = scaled(_tiled(inputs), _OF_VALUES)
        # 16 bits of a weight that is there anyway, rather than 8 more for each micro batch in flight
        ctx.save_for_backward(weight, *(rows if ctx.needs_input_grad[1] else ()))
        ctx.of_gradients, ctx.shape = of_gradients, inputs.shape
        found = product(rows, scaled(weight, _OF_VALUES).t(), inputs.dtype, quick=True)
        return _untiled(found, inputs.shape)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        """The gradients of those of both that learn."""
        weight, *rows = ctx.saved_tensors
        of_outputs = scaled(_tiled(gradient), ctx.of_gradients)
        of_inputs = of_weight = None
        if ctx.needs_input_grad[0]:
            found = product(of_outputs, scaled(weight, _OF_VALUES), gradient.dtype)
            of_inputs = _untiled(found, ctx.shape)
        if ctx.needs_input_grad[1]:
            of_weight = product(of_outputs.t(), Scaled(*rows), weight.dtype)
        return of_inputs, of_weight, None


def _tiled(tensor: torch.Tensor) -> torch.Tensor:
    """As a matrix, with zeros below, so that its rows are some multiple of 16: an expert gets any number, or none."""
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
    """What megatron-core's parallel linear layers compute with, in 8 bits.

    Args:
        input: ``[sequence, batch, k]`` or ``[tokens, k]``, in 16 bits.
        weight: ``[m, k]``.
        bias: ``[m]``.
        fp8_format: all in ``e4m3``, or with gradients in e5m2: ``hybrid``.
        allreduce_dgrad: the gradient of the input is the sum of what the tensor-parallel workers find.
        sequence_parallel: each of them has a part of the sequence, to be gathered, and scattered backward.
        tp_group: these workers.
        ignored: ways to compute the gradient of weights that have no meaning here.
    """
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    outputs = _Linear.apply(input, weight, _OF_GRADIENTS[fp8_format])
    return outputs if bias is None else outputs + bias


def multiply_in_8_bits(chunk: MegatronModule, fp8_format: str) -> None:
    """Lets the linear layers of attention and of feed-forward parts, experts among them, compute in 8 bits.

    Routers, embeddings and the output layer stay in 16 bits, as with Transformer Engine.

    Args:
        chunk: of megatron-core's local layers.
        fp8_format: all in ``e4m3``, or with gradients in e5m2: ``hybrid``.

    Raises:
        ConfigError: a weight has sides for which there is no such product, or the GPU has none.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name()} does not multiply in 8 bits, which takes compute capability 8.9: drop "
            "--fp8-format."
        )
    for name, module in chunk.named_modules():
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear)) and not name.endswith("output_layer"):
            shape = () if module.weight is None else module.weight.shape
            if any(side % TILE for side in shape):
                raise ConfigError(
                    f"the weight of {name} is {' x '.join(map(str, shape))}, and products in 8 bits "
                    f"take multiples of {TILE}: change the sizes of the model or --tensor-model-parallel-size, or "
                    "drop --fp8-format."
                )
            module._forward_impl = partial(linear, fp8_format=fp8_format)
