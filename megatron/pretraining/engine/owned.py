"""Provides optimizer state by parameter: the live slices of master weights and moments that this rank owns.

Each storage scheme has one adapter:

* ZeRO-1 of megatron-core (``DistributedOptimizer``), also with its state in host memory (``HybridDeviceOptimizer``);
* replicas with fp32 masters and 16-bit weights;
* replicas with master and weight in one tensor, fp32 or bf16;
* complete parameters, each on one rank (``LayerWiseDistributedOptimizer``);
* ZeRO-1 and 2 of DeepSpeed (:class:`ZeroOptimizer`);
* blocks that several ranks hold (:class:`ShardedOptimizer`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.utils import get_pg_size

from megatron.pretraining.config import ConfigError
from megatron.pretraining.engine.sharded import ShardedOptimizer
from megatron.pretraining.engine.zero.optimizer import ZeroOptimizer
from moc.state.adam import Rule
from moc.state.operators import OwnedSlice

MASTER, GRAD = "master", "grad"
_NO_COUNTER: Any = MappingProxyType({})
"""Counter for an optimizer that counts no updates; never written."""
_TORCH_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_OTHER_ADAMS = ("FusedAdam", "SmallMomentsAdam")


def members(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Returns the optimizers that a megatron-core optimizer chains, at all levels, without stubs."""
    core: Any = optimizer
    if hasattr(core, "chained_optimizers"):
        return [member for child in core.chained_optimizers for member in members(child)]
    return [] if core.is_stub_optimizer else [optimizer]


def layer_wise_parts(optimizer: MegatronOptimizer) -> list[LayerWiseDistributedOptimizer]:
    """Returns the optimizers in a chain that assign each complete parameter to one rank."""
    core: Any = optimizer
    if isinstance(core, LayerWiseDistributedOptimizer):
        return [core]
    return [part for child in getattr(core, "chained_optimizers", ()) for part in layer_wise_parts(child)]


def gather_layers(optimizer: MegatronOptimizer) -> None:
    """All-gathers the parameters that each rank owns, unless gradient buffers sync them; a collective call."""
    for part in layer_wise_parts(optimizer):
        if not part.use_buffer_param_sync:
            part.allgather_params()


def sharded_part(optimizer: MegatronOptimizer) -> ShardedOptimizer | None:
    """Returns the optimizer of dense parameters, if several ranks hold each block of its state."""
    return next((member for member in members(optimizer) if isinstance(member, ShardedOptimizer)), None)


def sharded_members(optimizer: MegatronOptimizer) -> set[MegatronOptimizer]:
    """Returns the members whose state is divided among data-parallel ranks instead of replicated."""
    by_layers = {
        member for part in layer_wise_parts(optimizer) if get_pg_size(part.dp_cp) > 1 for member in members(part)
    }
    kinds = DistributedOptimizer, ZeroOptimizer, ShardedOptimizer
    return by_layers | {member for member in members(optimizer) if isinstance(member, kinds)}


def _divided_members(optimizer: MegatronOptimizer) -> set[MegatronOptimizer]:
    """Returns the members that are sharded over more than one rank."""

    def is_divided(member: MegatronOptimizer) -> bool:
        return not isinstance(member, DistributedOptimizer) or member.data_parallel_group.size() > 1

    return {member for member in sharded_members(optimizer) if is_divided(member)}


def is_frozen(parameter: torch.nn.Parameter) -> bool:
    """Returns whether a parameter receives no updates (:mod:`megatron.pretraining.engine.state`)."""
    return not parameter.requires_grad or getattr(parameter, "frozen", False)


def owned_slices(optimizer: MegatronOptimizer) -> Iterator[OwnedSlice]:
    """Yields the slices that this rank owns; creates moments as zeros that torch would create at the first step.

    Raises:
        ConfigError: the shape of an optimizer's state differs from its parameter's.
    """
    divided = _divided_members(optimizer)
    for member in members(optimizer):
        counter_of, inner_of = _counter_of(member), _inner_of(member)
        for part in _parts(member):
            moments = _primed_moments(inner_of(part.main), getattr(member, "init_state_fn", None), part.main)
            slots = {MASTER: part.main.detach().view(-1)} | {name: values.view(-1) for name, values in moments.items()}
            counter = counter_of(part.main)
            yield OwnedSlice(part.parameter, part.start, part.stop, slots, member in divided, counter, part.copy)


def owned_gradients(optimizer: MegatronOptimizer) -> Iterator[OwnedSlice]:
    """Yields the reduced gradients of the slices that this rank owns, in their live memory."""
    divided = _divided_members(optimizer)
    for member in members(optimizer):
        if isinstance(member, ZeroOptimizer):
            for fragment in member.fragments:
                stop = fragment.start + fragment.gradient.numel()
                yield OwnedSlice(fragment.parameter, fragment.start, stop, {GRAD: fragment.gradient}, sharded=True)
            continue
        for part in _parts(member):
            parameter: Any = part.parameter  # megatron-core sets main_grad on it
            values = parameter.main_grad.detach().view(-1)[part.start : part.stop]
            yield OwnedSlice(part.parameter, part.start, part.stop, {GRAD: values}, member in divided, copy=part.copy)


def parameters_and_masters(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yields the parameters with a slice on this rank, with its master weights, once per slice."""
    for member in members(optimizer):
        yield from _masters_of(member)


def get_step(optimizer: MegatronOptimizer) -> int:
    """Returns the number of updates in the moments (for Adam's bias correction).

    Raises:
        ValueError: parameters differ.
    """
    # one job may have an optimizer that counts (Adam) and one that does not (Muon)
    steps = {int(counter["step"]) for counter in _counters(optimizer) if "step" in counter}
    if len(steps) > 1:
        raise ValueError(f"parameters have seen different numbers of updates: {sorted(steps)}")
    return steps.pop() if steps else 0


def set_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Sets the number of updates for every parameter."""
    for counter in _counters(optimizer):
        write_step(counter, step)


def write_step(counter: Any, step: int) -> None:
    """Sets the number of updates in a counter; does nothing for an optimizer without one."""
    if counter is _NO_COUNTER:
        return
    if isinstance(counter.get("step"), torch.Tensor):
        counter["step"] = torch.full_like(counter["step"], float(step))
    else:
        counter["step"] = step


def drop_gradients(member: MegatronOptimizer, moving: Collection[torch.nn.Parameter] | None = None) -> None:
    """Removes the gradients of frozen parameters, or of all except ``moving``, so that the optimizer skips them.

    With zero gradients, momentum and weight decay would still apply.
    """
    inner: Any = member.optimizer
    for parameter, main in _masters_of(member):
        if is_frozen(parameter) or moving is not None and parameter not in moving:
            main.grad = None
            if isinstance(inner, HybridDeviceOptimizer):
                inner.inner_param_to_orig_param[main].decoupled_grad = None
                inner.cpu_copy_map_grad.pop(main, None)  # it would repeat the gradient of an earlier update


class AdamGroup(NamedTuple):
    """Adam parameter group, whose values follow their schedules, and whether weight decay is decoupled.

    The fused Adam of Transformer Engine and apex has other kernels than torch, so its rule's results may differ in
    bits.
    """

    values: dict
    decoupled: bool

    @property
    def rule(self) -> Rule:
        """Rule of the next update."""
        beta1, beta2 = self.values["betas"]
        rate, decay, eps = float(self.values["lr"]), float(self.values["weight_decay"]), float(self.values["eps"])
        return Rule(rate, decay, float(beta1), float(beta2), eps, self.decoupled)


def adam_groups(optimizer: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, AdamGroup]]:
    """Yields the parameters on this rank that an Adam updates with fp32 masters, each with its group."""
    for member in members(optimizer):
        inner: Any = member.optimizer
        if type(inner) not in _TORCH_ADAMS and type(inner).__name__ != "FusedAdam":
            continue
        groups = {main: group for group in inner.param_groups for main in group["params"]}
        for parameter, main in _masters_of(member):
            group = groups[main]
            if main.dtype is torch.float32 and not group.get("amsgrad") and not group.get("maximize"):
                decoupled = bool(group.get("decoupled_weight_decay", getattr(inner, "adam_w_mode", True)))
                yield parameter, AdamGroup(group, decoupled)


def _counters(optimizer: MegatronOptimizer) -> Iterator[dict]:
    for member in members(optimizer):
        counter_of, pairs = _counter_of(member), _masters_of(member)
        yield from (counter_of(main) for parameter, main in pairs if not getattr(parameter, "unused", False))


def _counter_of(member: MegatronOptimizer) -> Callable[[torch.Tensor], dict]:
    """Returns a function from a parameter's master weights to its update counter."""
    inner: Any = member.optimizer
    if isinstance(inner, HybridDeviceOptimizer):
        inner_of = _inner_of(member)
        return lambda main: _counter_in(inner_of(main))(main)
    return _counter_in(inner)


def _inner_of(member: MegatronOptimizer) -> Callable[[torch.Tensor], Any]:
    """Returns a function from a parameter's master weights to torch's optimizer that updates them."""
    inner: Any = member.optimizer
    if not isinstance(inner, HybridDeviceOptimizer):
        return lambda main: inner
    parts = (
        (main, sub_optimizer)
        for sub_optimizer in inner.sub_optimizers
        for group in sub_optimizer.param_groups
        for main in group["params"]
    )
    return dict(parts).__getitem__


def _counter_in(inner: Any) -> Callable[[torch.Tensor], dict]:
    if isinstance(inner, _TORCH_ADAMS):
        return inner.state.__getitem__
    if type(inner).__name__ in _OTHER_ADAMS:
        # torch counts per parameter; the fused Adam of Transformer Engine and apex per group, from the first update on
        return {main: group for group in inner.param_groups for main in group["params"]}.__getitem__
    return lambda main: _NO_COUNTER


class _Part(NamedTuple):
    """Slice of a flattened parameter that this rank owns, its master weights, and the index of this copy."""

    parameter: torch.nn.Parameter
    start: int
    main: torch.Tensor
    copy: int = 0

    @property
    def stop(self) -> int:
        return self.start + self.main.numel()


def _parts(member: MegatronOptimizer) -> Iterator[_Part]:
    if isinstance(member, ShardedOptimizer):
        yield from (
            _Part(shard.parameter, shard.start, shard.master, shard.holder_index) for shard in member.shards.values()
        )
        return
    for parameter, main in _masters_of(member):
        yield _Part(parameter, _start(member, parameter), main)


def _start(member: MegatronOptimizer, parameter: torch.nn.Parameter) -> int:
    """Returns the first index of this rank's slice in the flattened parameter."""
    if isinstance(member, ZeroOptimizer):
        return member.starts[parameter]
    return (
        member._get_model_param_range_map(parameter)["param"].start if isinstance(member, DistributedOptimizer) else 0
    )


def _masters_of(member: MegatronOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    if isinstance(member, ZeroOptimizer):
        yield from ((fragment.parameter, fragment.master) for fragment in member.fragments)
        return
    if isinstance(member, ShardedOptimizer):
        yield from ((shard.parameter, shard.master) for shard in member.shards.values())
        return
    inner: Any = member.optimizer
    if isinstance(member, DistributedOptimizer):
        model_groups = member.model_float16_groups + member.model_fp32_groups
        main_groups = member.shard_fp32_from_float16_groups + member.shard_fp32_groups
        if isinstance(inner, HybridDeviceOptimizer):
            shards = member.shard_float16_groups + member.shard_fp32_groups
            main_groups = [[inner.param_to_inner_param[shard] for shard in group] for group in shards]
    elif isinstance(member, Float16OptimizerWithFloat16Params):
        model_groups = member.float16_groups + member.fp32_from_fp32_groups
        main_groups = member.fp32_from_float16_groups + member.fp32_from_fp32_groups
    else:
        model_groups = main_groups = [group["params"] for group in inner.param_groups]
    for model_group, main_group in zip(model_groups, main_groups, strict=True):
        yield from zip(model_group, main_group, strict=True)


def _primed_moments(inner: Any, initialize: Callable[..., None] | None, main: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns a parameter's moments by name, by the optimizer's class; a job may use several (Adam and Muon)."""
    if isinstance(inner, _TORCH_ADAMS) or type(inner).__name__ in _OTHER_ADAMS:
        names: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    elif isinstance(inner, torch.optim.SGD) or initialize is None:
        names = ("momentum_buffer",) if inner.param_groups[0].get("momentum") else ()
    else:  # such as the optimizers of emerging-optimizers, which define their own state
        return _initialized_moments(inner, initialize, main)
    state, formats = inner.state[main], getattr(inner, "name_to_dtype_map", {})  # some keep moments in other dtypes
    for name in names:
        if state.get(name) is None:
            dtype = formats.get(name, main.dtype)
            state[name] = torch.zeros_like(main, dtype=dtype, memory_format=torch.preserve_format).detach()
    if isinstance(inner, _TORCH_ADAMS) and "step" not in state:
        settings = inner.param_groups[0]  # as torch: a fused kernel reads the count on the device
        on_device = settings.get("fused") or settings.get("capturable")
        state["step"] = torch.zeros((), device=main.device if on_device else "cpu")
    return {name: state[name] for name in names}


def _initialized_moments(
    inner: torch.optim.Optimizer, initialize: Callable[..., None], main: torch.Tensor
) -> dict[str, torch.Tensor]:
    if not inner.state.get(main):
        initialize(inner)
    state = inner.state[main]
    if misshapen := [name for name, value in state.items() if not torch.is_tensor(value) or value.shape != main.shape]:
        raise ConfigError(
            f"the optimizer {type(inner).__name__} keeps {misshapen[0]}, which has not the shape of the parameter, and "
            "snapshots contain parts of parameters. Fix: choose another --optimizer",
            code="optimizer-unsupported",
        )
    return dict(state)
