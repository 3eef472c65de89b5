"""Stores Adam's moments in 8 and 16 bits between updates: the optimizer state of MoEvement's Table 7, fourth row.

Table 7 takes it from FP8-LM (Peng et al., 2023), which scales each tensor by its largest value.  Here each element is
encoded separately.  So any slicing of the moments (ZeRO, tensor parallelism, snapshots, conversion) yields the same
bits, and experts without tokens so far, whose largest value is zero, need no special case:

    exp_avg_sq   the square root of the second moment v in fp16, times 2^14: covers gradients between 4e-12 and 4
    exp_avg      the first moment m divided by that root in fp8 (e4m3), times 32

Adam's two means bound the quotient: by the Cauchy-Schwarz inequality, for beta1^2 < beta2,

    |m| / sqrt(v) <= (1 - beta1) / sqrt(1 - beta2) / sqrt(1 - beta1^2 / beta2)

which is 7.3 for (0.9, 0.999) and 1.2 for (0.9, 0.95); the format holds up to 14.  Larger values are clamped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.optim.adamw import adamw

FORMATS = {"fp32": torch.float32, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
_FIRST, _SECOND = "exp_avg", "exp_avg_sq"
_SCALE = {_FIRST: 2.0**5, _SECOND: 2.0**14}  # powers of two scale without rounding
_AT_ONCE = 2**26  # elements decoded to fp32 at a time: 1 GB with weight and gradient


class SmallMomentsAdam(torch.optim.AdamW):
    """torch's AdamW in fp32 on 16- or 32-bit weights, with moments stored in smaller formats.

    Args:
        groups: parameter groups of the replaced Adam; the same dicts.
        exp_avg: format of the first moment, a key of ``FORMATS``.
        exp_avg_sq: format of the second moment; not fp8, since 3 mantissa bits would not resolve its decay.
    """

    def __init__(self, groups: list[dict], exp_avg: str, exp_avg_sq: str):
        super().__init__([{**group, "params": []} for group in groups])  # torch rejects ZeRO-1's slices as non-leaves
        for group, settings in zip(groups, self.param_groups, strict=True):
            group.update(settings | group)
        self.param_groups = groups
        self.name_to_dtype_map = {_FIRST: FORMATS[exp_avg], _SECOND: FORMATS[exp_avg_sq]}
        """Storage dtype of each moment, under the name that Transformer Engine's optimizer uses."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Updates every parameter that has a gradient; the state of all others stays bit-identical."""
        for group in self.param_groups:
            for parameters in _batches(parameter for parameter in group["params"] if parameter.grad is not None):
                self._update(group, parameters)

    def _update(self, group: dict, parameters: list[torch.Tensor]) -> None:
        states = [self._initialized_state(parameter) for parameter in parameters]
        weights = [parameter.float() for parameter in parameters]  # fp32 parameters are returned as they are
        means, squares = zip(*(_decoded(state) for state in states), strict=True)
        beta1, beta2 = group["betas"]
        adamw(
            weights,
            [parameter.grad.float() for parameter in parameters if parameter.grad is not None],  # none is None here
            list(means),
            list(squares),
            [],
            [state["step"] for state in states],
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        for parameter, weight in zip(parameters, weights, strict=True):
            if weight is not parameter:
                parameter.copy_(weight)
        for state, mean, square in zip(states, means, squares, strict=True):
            _encode(mean, square, state)

    def _initialized_state(self, parameter: torch.Tensor) -> dict:
        state = self.state[parameter]
        if not state:
            state |= {name: torch.zeros_like(parameter, dtype=d) for name, d in self.name_to_dtype_map.items()}
            state["step"] = torch.tensor(0.0)
        return state


def _decoded(state: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both moments in fp32."""
    mean, square = state[_FIRST], state[_SECOND]
    if square.dtype != torch.float32:
        square = (square.float() / _SCALE[_SECOND]).square_()
    if mean.dtype != torch.float32:
        mean = mean.float().mul_(square.sqrt()).div_(_SCALE[_FIRST])
    return mean, square


def _encode(mean: torch.Tensor, square: torch.Tensor, state: dict) -> None:
    """Stores both moments in place in their formats, rounded to nearest."""
    if state[_SECOND].dtype != torch.float32:
        _write(square.sqrt().mul_(_SCALE[_SECOND]), state[_SECOND])
        square = (state[_SECOND].float() / _SCALE[_SECOND]).square_()  # the value that the next update decodes
    if state[_FIRST].dtype != torch.float32:
        root = square.sqrt()
        quotient = torch.where(root > 0, mean / root, 0.0)
        _write(quotient.mul_(_SCALE[_FIRST]), state[_FIRST])


def _write(values: torch.Tensor, target: torch.Tensor) -> None:
    limit = torch.finfo(target.dtype).max
    target.copy_(values.clamp_(-limit, limit))


def _batches(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yields batches of parameters, so that temporary fp32 moments do not use the memory that the formats save."""
    batch, elements = [], 0
    for parameter in parameters:
        if batch and elements + parameter.numel() > _AT_ONCE:
            yield batch
            batch, elements = [], 0
        batch.append(parameter)
        elements += parameter.numel()
    if batch:
        yield batch
