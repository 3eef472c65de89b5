"""Splits the step of megatron-core's optimizers at the commit all-reduce: local statistics before, the update after.

``MegatronOptimizer.step()`` mixes collectives with changes of state.  Here a rank's gradient statistics are a pure
contribution (:meth:`CommitOptimizer.local_square_norm`) to the commit all-reduce.  :meth:`CommitOptimizer.apply`
changes state without collectives, which could leave ranks inconsistent.  :meth:`CommitOptimizer.gather_weights`,
ZeRO-1's all-gather of updated weights, is safe to repeat.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron.pretraining.engine.owned import (
    drop_gradients,
    gather_layers,
    members,
    parameters_and_masters,
    sharded_members,
    sharded_part,
)
from megatron.pretraining.engine.sharded import ShardedOptimizer
from moc.state.adam import gradient_factor

EXACT, STOCK = "exact", "stock"
"""Norms of gradients: a float64 sum that is the same in every layout, and Megatron-LM's float32 norm."""


class CommitOptimizer:
    """megatron-core optimizer whose step is split by the commit all-reduce."""

    def __init__(
        self, core: MegatronOptimizer, chunks: list[DistributedDataParallel], clip_grad: float, norm: str = EXACT
    ):
        self.core = core
        self.norm = norm
        """Kind of gradient norm: :data:`EXACT` or :data:`STOCK`."""
        self.clip_grad, self._chunks = clip_grad, chunks
        self._known_scale: tuple[torch.Tensor | None, float] = None, 1.0
        self.reduced: int | None = None
        """Iteration, counted from 1, whose reduced gradients this rank holds; None if it holds none."""

    @property
    def loss_scale(self) -> float:
        """Factor on the loss before backward (1.0 without fp16).

        megatron-core replaces the tensor when the factor changes, so it is read only then: a read waits for the device.
        """
        scale: torch.Tensor = self.core.get_loss_scale()
        if scale is not self._known_scale[0]:
            self._known_scale = scale, float(scale.item())
        return self._known_scale[1]

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        groups = [g for g in self.core.param_groups if g["params"]]
        return max((g["lr"] for g in groups), default=0.0)

    def zero_grad(self) -> None:
        """Drops the gradients of the previous iteration, which are kept until the next one starts."""
        self.reduced = None
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.core.zero_grad()

    @torch.no_grad()
    def take_gradients(self, moving: Collection[torch.nn.Parameter] | None = None) -> None:
        """Passes the reduced gradients to the optimizer, except gradients of frozen operators.

        ``moving`` limits this to some parameters; the others do not change.
        """
        moving = moving if moving is None else set(moving)
        for member in members(self.core):
            if isinstance(member, MixedPrecisionOptimizer):
                copies: Any = member  # every subclass has the method; the base class does not declare it
                copies._copy_model_grads_to_main_grads()
            else:
                member.prepare_grads()
            drop_gradients(member, moving)

    def norm_contribution(self) -> dict[str, torch.Tensor | float]:
        """Returns this rank's contribution to the gradient norm; with Megatron-LM's norm, a collective call."""
        if self.norm == EXACT:
            return {"square_norm": self.local_square_norm()}
        core: Any = self.core
        norm = float(core.get_grad_norm())
        # equal on all ranks: a sum with zeros has the same bits
        return {"norm": norm if dist.get_rank() == 0 or not math.isfinite(norm) else 0.0}

    def total_norm(self, totals: dict[str, float]) -> float:
        """Returns the norm before clipping, without the loss scale; inf if it is not finite."""
        value = totals["square_norm"] if self.norm == EXACT else totals["norm"]
        if not math.isfinite(value):
            return math.inf
        return (math.sqrt(value) if self.norm == EXACT else value) / self.loss_scale

    @torch.no_grad()
    def local_square_norm(self) -> torch.Tensor:
        """Returns this rank's part of the squared gradient norm, still loss-scaled; a float64 scalar on the device.

        The parts of all ranks sum to the total, with each element counted once.  Shared parameters and tensor-parallel
        duplicates are excluded as in Megatron-LM; only the first data-parallel replica counts.  An overflow on any rank
        makes the sum non-finite.
        """
        total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        for member in members(self.core):
            gradients = member.get_grads_for_grad_norm()
            if gradients and self._counts_for_norm(member):
                total += _square_norm(gradients)
        return total

    @torch.no_grad()
    def count_zeros(self) -> torch.Tensor:
        """Counts this rank's zero gradient elements (``--log-num-zeros-in-grad``), selected as in the norm."""
        total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        for member in members(self.core):
            if self._counts_for_norm(member):
                for gradient in member.get_grads_for_grad_norm():
                    total += gradient.numel() - torch.count_nonzero(gradient)
        return total

    @torch.no_grad()
    def local_params_square_norm(self) -> torch.Tensor:
        """Returns this rank's part of the squared norm of all weights (``--log-params-norm``), without duplicates."""
        total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        for chunk in self._chunks:
            weights: list[torch.Tensor] = [p for p in chunk.parameters() if self._is_first_copy(p)]
            if weights:
                total += _square_norm(weights)
        return total

    @torch.no_grad()
    def apply(self, grad_norm: float) -> None:
        """Clips by the agreed (or, in a replay, recorded) norm and updates this rank's parameters.

        Skips the update if the norm is not finite; all ranks decide identically.
        """
        finite = math.isfinite(grad_norm)
        if finite:
            self._scale_gradients(gradient_factor(grad_norm, self.clip_grad, self.loss_scale))
            for member in members(self.core):
                _update(member)
        self.core.zero_grad()  # frees the scaled copies; the reduced gradients stay in the buffers
        for member in members(self.core):
            if scaler := getattr(member, "grad_scaler", None):
                scaler.update(not finite)

    def gather_weights(self) -> None:
        """All-gathers the updated weights of the data-parallel peers; safe to repeat.

        Does nothing with ``--overlap-param-gather``, since the next forward pass gathers weights on demand.
        """
        for chunk in self._chunks:
            if chunk.ddp_config.use_distributed_optimizer and not chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync()
        if (sharded := sharded_part(self.core)) is not None:
            sharded.gather_weights()
        gather_layers(self.core)

    def _counts_for_norm(self, member: MegatronOptimizer) -> bool:
        if member in sharded_members(self.core):
            return True
        return self._copy(experts=any(group.get("is_expert_parallel") for group in member.param_groups)) == 0

    def _is_first_copy(self, parameter: torch.nn.Parameter) -> bool:
        experts = not getattr(parameter, "allreduce", True)
        tensor_group = (
            parallel_state.get_expert_tensor_parallel_group()
            if experts
            else parallel_state.get_tensor_model_parallel_group()
        )
        return (
            self._copy(experts) == 0
            and param_is_not_shared(parameter)
            and param_is_not_tensor_parallel_duplicate(parameter, tensor_group)
        )

    def _copy(self, experts: bool) -> int:
        """Returns the index of this rank among the ranks over which these gradients are reduced."""
        chunk = self._chunks[0]
        return (chunk.expt_dp_group if experts else chunk.dp_cp_group).rank()

    def _scale_gradients(self, factor: float) -> None:
        if factor == 1.0:
            return
        for member in members(self.core):
            config: Any = member.config
            name = "decoupled_grad" if config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
            with_gradients = [
                (p, gradient) for p in member.get_parameters() if (gradient := getattr(p, name, None)) is not None
            ]
            if with_gradients:
                gradients = [gradient for _, gradient in with_gradients]
                # not in place: these may be the reduced gradients, which must stay unscaled
                scaled = torch._foreach_mul(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]  # no other
                for (parameter, _), gradient in zip(with_gradients, scaled, strict=True):
                    setattr(parameter, name, gradient)


def _update(member: MegatronOptimizer) -> None:
    if isinstance(member, DistributedOptimizer):
        super(DistributedOptimizer, member).step_with_ready_grads()  # DistributedOptimizer's method also all-gathers
    else:
        member.step_with_ready_grads()


def _square_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    # in fp32, the sum, which determines clipping, would depend on how tensors are split over ranks
    norms = torch._foreach_norm(tensors, dtype=torch.float64)  # pyright: ignore[reportPrivateImportUsage]  # no other
    return torch.stack(norms).square().sum()


def shard_by_blocks(core: Any, chunks: Sequence[DistributedDataParallel]) -> None:
    """Replaces megatron-core's optimizer of dense parameters by a sharded one."""
    dense, group = members(core)[0], chunks[0].dp_cp_group
    sharded = ShardedOptimizer(dense, [*parameters_and_masters(dense)], group)
    core.chained_optimizers[core.chained_optimizers.index(dense)] = sharded
