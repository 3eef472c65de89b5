"""Optimizer state by parameter: the live slices of master weights and moments that this rank owns.

One adapter for each way in which megatron-core stores it: ZeRO-1 (``DistributedOptimizer``), replicated with fp32
masters beside 16-bit weights, and replicated with master and weight in one tensor, fp32 or bf16.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from moc.state.adam import Rule
from moc.state.fragments import OwnedSlice

MASTER = "master"
_TORCH_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


def members(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that a megatron-core optimizer chains (dense and expert), without stubs."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [o for o in chained if not o.is_stub_optimizer]


def owned_slices(optimizer: MegatronOptimizer) -> Iterator[OwnedSlice]:
    """Yields the slices that this rank owns; moments that torch would create at the first step are created as zeros."""
    for member in members(optimizer):
        moments = _MOMENTS[member.config.optimizer]
        sharded = isinstance(member, DistributedOptimizer) and member.data_parallel_group.size() > 1
        groups = {main: group for group in member.optimizer.param_groups for main in group["params"]}
        for parameter, main in _of_member(member):
            state = _primed_state(member.optimizer, main, moments)
            whole = not isinstance(member, DistributedOptimizer)
            span = None if whole else member._get_model_param_range_map(parameter)["param"]
            start, stop = (span.start, span.end) if span else (0, parameter.numel())
            slots = {MASTER: main.detach().view(-1)} | {m: state[m].view(-1) for m in moments}
            yield OwnedSlice(parameter, start, stop, slots, sharded, _counter(member, state, groups[main]))


def parameters_and_masters(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yields the parameters of which this rank owns a slice, with its master weights."""
    for member in members(optimizer):
        yield from _of_member(member)


def get_step(optimizer: MegatronOptimizer) -> int:
    """Number of updates in the moments (for Adam's bias correction); raises ValueError if parameters differ."""
    steps = {int(counter.get("step", 0)) for counter in _counters(optimizer)}
    if len(steps) > 1:
        raise ValueError(f"parameters have seen different numbers of updates: {sorted(steps)}")
    return steps.pop() if steps else 0


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Sets the number of updates for every parameter."""
    for counter in _counters(optimizer):
        write_step(counter, step)


def write_step(counter: dict, step: int) -> None:
    """Sets the number of updates in a counter."""
    if isinstance(counter.get("step"), torch.Tensor):
        counter["step"] = torch.full_like(counter["step"], float(step))
    else:
        counter["step"] = step


def drop_gradients(member: MegatronOptimizer, moving: Collection[torch.nn.Parameter] | None = None) -> None:
    """Removes the gradients of frozen parameters, or of all but the ``moving`` ones, from an optimizer: it skips them.

    Gradients of zeros would not do: momentum and weight decay would still be applied.
    """
    for parameter, main in _of_member(member):
        if not parameter.requires_grad or moving is not None and parameter not in moving:
            main.grad = None


class AdamGroup(NamedTuple):
    """A parameter group of an Adam, whose values change with their schedules, and whether weights decay by themselves.

    Transformer Engine's and apex's fused Adam has other kernels than torch: what its rule gives may differ in bits.
    """

    values: dict
    decoupled: bool

    @property
    def rule(self) -> Rule:
        """How it updates next."""
        beta1, beta2 = self.values["betas"]
        rate, decay, eps = float(self.values["lr"]), float(self.values["weight_decay"]), float(self.values["eps"])
        return Rule(rate, decay, float(beta1), float(beta2), eps, self.decoupled)


def adam_groups(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, AdamGroup]]:
    """Yields the parameters on this rank that an Adam updates with fp32 masters, and its group of each."""
    for member in members(optimizer):
        inner: Any = member.optimizer
        if type(inner) not in _TORCH_ADAMS and type(inner).__name__ != "FusedAdam":
            continue
        groups = {main: group for group in inner.param_groups for main in group["params"]}
        for parameter, main in _of_member(member):
            group = groups[main]
            if main.dtype is torch.float32 and not group.get("amsgrad") and not group.get("maximize"):
                decoupled = bool(group.get("decoupled_weight_decay", getattr(inner, "adam_w_mode", True)))
                yield parameter, AdamGroup(group, decoupled)


def _counters(optimizer: MegatronOptimizer) -> Iterator[dict]:
    for member in members(optimizer):
        inner = member.optimizer
        groups = {main: group for group in inner.param_groups for main in group["params"]}
        for parameter, main in _of_member(member):
            if not getattr(parameter, "unused", False):
                yield _counter(member, inner.state[main], groups[main])


def _counter(member: MegatronOptimizer, state: dict, group: dict) -> dict:
    if member.config.optimizer != "adam":
        return {}
    # torch counts per parameter; Transformer Engine's and apex's fused Adam per group, from the first update on
    return state if isinstance(member.optimizer, _TORCH_ADAMS) else group


def _of_member(member: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    if isinstance(member, DistributedOptimizer):
        model_groups = member.model_float16_groups + member.model_fp32_groups
        main_groups = member.shard_fp32_from_float16_groups + member.shard_fp32_groups
    elif isinstance(member, Float16OptimizerWithFloat16Params):
        model_groups = member.float16_groups + member.fp32_from_fp32_groups
        main_groups = member.fp32_from_float16_groups + member.fp32_from_fp32_groups
    else:
        model_groups = main_groups = [group["params"] for group in member.optimizer.param_groups]
    for model_group, main_group in zip(model_groups, main_groups, strict=True):
        yield from zip(model_group, main_group, strict=True)


def _primed_state(inner: torch.optim.Optimizer, main: torch.Tensor, moments: tuple[str, ...]) -> dict:
    state, formats = inner.state[main], getattr(inner, "name_to_dtype_map", {})  # some keep moments in other dtypes
    for moment in moments:
        if state.get(moment) is None:
            dtype = formats.get(moment, main.dtype)
            state[moment] = torch.zeros_like(main, dtype=dtype, memory_format=torch.preserve_format).detach()
    if isinstance(inner, _TORCH_ADAMS) and "step" not in state:
        state["step"] = torch.tensor(0.0)
    return state
