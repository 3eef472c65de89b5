"""megatron-core's optimizers, split at the vote: rank-local statistics before it, the agreed update after it.

``MegatronOptimizer.step()`` mixes collectives with changes of state.  Here the gradient statistics of a rank are a
pure contribution (:meth:`VotedOptimizer.local_square_norm`), combined by the one all-reduce of the vote, and
:meth:`VotedOptimizer.apply` changes state without any collective that could leave ranks apart.  ZeRO-1's all-gather
of updated weights is :meth:`VotedOptimizer.gather_weights`, which is safe to repeat.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron.pretraining.config import Config
from megatron.pretraining.elastic.groups import gradient_groups
from megatron.pretraining.engine.owned import (
    drop_gradients,
    gather_layers,
    members,
    parameters_and_masters,
    sharded_members,
    sharded_part,
)
from megatron.pretraining.engine.rates import RateSchedule
from megatron.pretraining.engine.sharded import ShardedOptimizer
from megatron.pretraining.engine.small_moments import SmallMomentsAdam
from megatron.pretraining.engine.zero.build import build_zero_optimizer
from megatron.pretraining.engine.zero.chunk import ZeroChunk
from megatron.pretraining.model.build import compute_dtype
from moc.state.adam import gradient_factor

EXACT, STOCK = "exact", "stock"
"""Norms of gradients: a sum in float64, which is the same in every layout; and Megatron-LM's, in float32."""


class VotedOptimizer:
    """A megatron-core optimizer whose step is split by the vote of all ranks."""

    def __init__(
        self, core: MegatronOptimizer, chunks: list[DistributedDataParallel], clip_grad: float, norm: str = EXACT
    ):
        self.core = core
        self.norm = norm
        """How the gradient norm is computed: :data:`EXACT` or :data:`STOCK`."""
        self.clip_grad, self._chunks = clip_grad, chunks
        self.reduced: int | None = None
        """The iteration, counted from 1, whose reduced gradients this rank holds; None if it holds none."""

    @property
    def loss_scale(self) -> float:
        """The factor on the loss before backward (1.0 without fp16)."""
        return float(self.core.get_loss_scale().item())

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
        """Hands the reduced gradients to the optimizer, without those of frozen operators.

        With ``moving``, only those of these parameters: the others stay as they are.
        """
        moving = moving if moving is None else set(moving)
        for member in members(self.core):
            if isinstance(member, MixedPrecisionOptimizer):
                copies: Any = member  # every subclass has the method; the base class does not declare it
                copies._copy_model_grads_to_main_grads()
            else:
                member.prepare_grads()
            drop_gradients(member, moving)

    def norm_ballot(self) -> dict[str, torch.Tensor]:
        """This rank's contribution to the vote on the gradient norm; with Megatron-LM's norm a collective call."""
        if self.norm == EXACT:
            return {"square_norm": self.local_square_norm()}
        core: Any = self.core
        norm = torch.tensor(float(core.get_grad_norm()), dtype=torch.float64, device=torch.cuda.current_device())
        # equal on all ranks: a sum with zeros has the same bits
        return {"norm": norm if dist.get_rank() == 0 or not norm.isfinite() else torch.zeros_like(norm)}

    def voted_norm(self, vote: dict[str, float]) -> float:
        """The norm before clipping, with the loss scale divided out; inf if it is not finite."""
        value = vote["square_norm"] if self.norm == EXACT else vote["norm"]
        if not math.isfinite(value):
            return math.inf
        return (math.sqrt(value) if self.norm == EXACT else value) / self.loss_scale

    @torch.no_grad()
    def local_square_norm(self) -> torch.Tensor:
        """This rank's part of the squared gradient norm, still loss-scaled; a float64 scalar on the device.

        The parts of all ranks add up to the whole, each element counted once: shared parameters and tensor-parallel
        duplicates are left out as in Megatron-LM, and of data-parallel replicas only the first counts.  An overflow on
        any rank makes the sum non-finite.
        """
        total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        for member in members(self.core):
            gradients = member.get_grads_for_grad_norm()
            if gradients and self._counts_for_norm(member):
                total += _square_norm(gradients)
        return total

    @torch.no_grad()
    def count_zeros(self) -> torch.Tensor:
        """This rank's number of zero gradient elements (``--log-num-zeros-in-grad``), counted as in the norm."""
        total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        for member in members(self.core):
            if self._counts_for_norm(member):
                for gradient in member.get_grads_for_grad_norm():
                    total += gradient.numel() - torch.count_nonzero(gradient)
        return total

    @torch.no_grad()
    def local_params_square_norm(self) -> torch.Tensor:
        """This rank's part of the squared norm of all weights (``--log-params-norm``), each element counted once."""
        total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        for chunk in self._chunks:
            weights: list[torch.Tensor] = [p for p in chunk.parameters() if self._is_first_copy(p)]
            if weights:
                total += _square_norm(weights)
        return total

    @torch.no_grad()
    def apply(self, grad_norm: float) -> None:
        """Clips by the voted (or, in a replay, recorded) norm and updates this rank's parameters.

        Skips the update if the norm is not finite; all ranks decide alike.
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
        """All-gathers the weights that the data-parallel peers own and have updated; safe to repeat.

        Does nothing with ``--overlap-param-gather``: the next forward gathers weights as it reaches them.
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
        """Index of this rank among those over which these gradients are reduced."""
        chunk = self._chunks[0]
        return (chunk.expt_dp_group if experts else chunk.dp_cp_group).rank()

    def _scale_gradients(self, factor: float) -> None:
        if factor == 1.0:
            return
        for member in members(self.core):
            held = [(p, p.grad) for p in member.get_parameters() if p.grad is not None]
            if held:
                gradients = [gradient for _, gradient in held]
                # not in place: these may be the reduced gradients themselves, which must stay unscaled
                scaled = torch._foreach_mul(gradients, factor)  # pyright: ignore[reportPrivateImportUsage]  # no other
                for (parameter, _), gradient in zip(held, scaled, strict=True):
                    parameter.grad = gradient


def _update(member: MegatronOptimizer) -> None:
    if isinstance(member, DistributedOptimizer):
        super(DistributedOptimizer, member).step_with_ready_grads()  # DistributedOptimizer's own also all-gathers
    else:
        member.step_with_ready_grads()


def _square_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    # in fp32 the sum would depend on where ranks cut the tensors, and with it the clipping of all gradients
    norms = torch._foreach_norm(tensors, dtype=torch.float64)  # pyright: ignore[reportPrivateImportUsage]  # no other
    return torch.stack(norms).square().sum()


def build_optimizer(config: Config, chunks: list[DistributedDataParallel]) -> VotedOptimizer:
    """Builds the optimizer over the model chunks and sets fp16's loss scale on the model."""
    chunk: Any = chunks[0]
    if isinstance(chunk, ZeroChunk):
        core = build_zero_optimizer(config, chunk, optimizer_config(config))
    else:
        groups = gradient_groups(config)
        core = get_megatron_optimizer(
            optimizer_config(config), [*chunks], use_gloo_process_groups=False, pg_collection=groups
        )
    if moments := config.mixed_precision.moments:
        for member in members(core):
            member.optimizer = SmallMomentsAdam(member.optimizer.param_groups, *moments)
    if config.shards_by_blocks:
        shard_by_blocks(core, chunks)
    chunk.config.grad_scale_func = core.scale_loss
    return VotedOptimizer(core, chunks, config.regularization.clip_grad, config.regularization.grad_norm)


def shard_by_blocks(core: Any, chunks: Sequence[DistributedDataParallel]) -> None:
    """Puts a sharded optimizer in the place of megatron-core's one of dense parameters."""
    dense, group = members(core)[0], chunks[0].dp_cp_group
    sharded = ShardedOptimizer(dense, [*parameters_and_masters(dense)], group)
    core.chained_optimizers[core.chained_optimizers.index(dense)] = sharded


def optimizer_config(config: Config) -> OptimizerConfig:
    """Translates the flags into megatron-core's ``OptimizerConfig``."""
    regularization, precision = config.regularization, config.mixed_precision
    return OptimizerConfig(
        optimizer=regularization.optimizer,
        lr=config.learning_rate.lr,
        min_lr=config.learning_rate.min_lr,
        weight_decay=regularization.weight_decay,
        adam_beta1=regularization.adam_beta1,
        adam_beta2=regularization.adam_beta2,
        adam_eps=regularization.adam_eps,
        sgd_momentum=regularization.sgd_momentum,
        clip_grad=regularization.clip_grad,
        fp16=precision.fp16,
        bf16=precision.bf16 and precision.main_params_dtype == "fp32",  # True makes megatron-core keep fp32 masters
        params_dtype=compute_dtype(config),
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
        use_distributed_optimizer=config.parallel.use_distributed_optimizer and not config.shards_by_blocks,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )


def build_scheduler(config: Config, optimizer: VotedOptimizer, train_samples: int, batch: int) -> RateSchedule:
    """Builds the schedule of learning rate and weight decay; its clock counts samples, ``batch`` per iteration."""
    rate, regularization = config.learning_rate, config.regularization
    decay = rate.lr_decay_samples or (rate.lr_decay_iters or 0) * batch or train_samples
    warmup = rate.lr_warmup_samples or rate.lr_warmup_iters * batch
    if rate.lr_warmup_fraction is not None:
        warmup = rate.lr_warmup_fraction * decay
    return RateSchedule(
        optimizer.core,
        init_lr=rate.lr_warmup_init,
        max_lr=rate.lr,
        min_lr=rate.min_lr,
        lr_warmup_steps=warmup,  # pyright: ignore[reportArgumentType]  # a fraction may be a float, as in Megatron-LM
        lr_decay_steps=decay,
        lr_decay_style=rate.lr_decay_style,
        start_wd=_first(regularization.start_weight_decay, regularization.weight_decay),
        end_wd=_first(regularization.end_weight_decay, regularization.weight_decay),
        wd_incr_steps=train_samples,
        wd_incr_style=regularization.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=rate.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=rate.override_opt_param_scheduler,
        wsd_decay_steps=rate.lr_wsd_decay_samples or (rate.lr_wsd_decay_iters or 0) * batch or None,
        lr_wsd_decay_style=rate.lr_wsd_decay_style,
    )


def _first(value, default):
    return default if value is None else value
