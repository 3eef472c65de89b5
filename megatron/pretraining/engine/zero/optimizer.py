"""Wraps DeepSpeed's ZeRO optimizer as a megatron-core optimizer, with one fp32 chunk per parameter part on this rank.

DeepSpeed flattens each parameter group, and this rank's part of it is one fp32 tensor.  Here the inner Adam receives
one view per model parameter instead of that tensor.  So each parameter has its own moments and update count, skips
updates while it is frozen, and is saved separately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron.pretraining.engine.fragmented import FragmentedOptimizer
from megatron.pretraining.engine.zero.chunk import ZeroChunk
from megatron.pretraining.engine.zero.gradients import PartitionedGradients


@dataclass(frozen=True, eq=False)
class ZeroFragment:
    """Part of a parameter that this rank updates.

    Attributes:
        name: name of the parameter in the chunk.
        start: index of the first element in the flattened parameter.
        master: fp32, 1-D, a view of the partition of its group.
        gradient: reduced, fp32, of the same elements.
    """

    name: str
    parameter: torch.nn.Parameter
    start: int
    master: torch.Tensor
    gradient: torch.Tensor


class ZeroOptimizer(FragmentedOptimizer):
    """Sharded megatron-core optimizer over DeepSpeed's partitions; also reduces the gradients of its chunk.

    Attributes:
        fragments: the parts of parameters that this rank updates.
        starts: by parameter, the index at which its part begins.
    """

    is_stub_optimizer = False

    def __init__(self, zero: Any, chunk: ZeroChunk, config: OptimizerConfig, gather: Any):
        super().__init__(zero.optimizer, config, _grad_scaler(config), lambda *_: None)
        self._zero, self._chunk, self._gather = zero, chunk, gather
        average = 1 if chunk.config.calculate_per_token_loss else dist.get_world_size(chunk.dp_cp_group)
        self._gradients = PartitionedGradients(zero, average)
        self.fragments = tuple(self._split())
        self._stages: Any = parallel_state.get_embedding_group(check_initialized=False)
        several = self._stages is not None and self._stages.size() > 1
        self._tied = [one for one in chunk.parameters() if several and getattr(one, "shared_embedding", False)]
        self.starts = {fragment.parameter: fragment.start for fragment in self.fragments}
        chunk.reducer = self

    def _split(self) -> Iterator[ZeroFragment]:
        for group, settings in enumerate(self.optimizer.param_groups):
            zero, gradients = self._zero, self._gradients.partitions[group]
            masters = zero.single_partition_of_fp32_groups[group].detach()
            first = dist.get_rank(zero.real_dp_process_group[group]) * masters.numel()
            self.optimizer.state.pop(settings["params"][0], None)
            settings["params"] = []
            # the order in the flat buffer; DeepSpeed's own map assumes another order with round_robin_gradients
            order = zero.round_robin_bit16_groups[group], zero.round_robin_bit16_offsets[group]
            for parameter, offset in zip(*order, strict=True):
                begin, end = max(offset, first), min(offset + parameter.numel(), first + masters.numel())
                if begin < end:
                    mine = slice(begin - first, end - first)
                    settings["params"].append(masters[mine])
                    name = zero.param_names[parameter]
                    yield ZeroFragment(name, parameter, begin - offset, settings["params"][-1], gradients[mine])

    # gradients of the chunk: see :class:`megatron.pretraining.engine.zero.chunk.Reducing`

    def begin_micro_batch(self) -> None:
        """Prepares DeepSpeed's hooks for the next backward."""
        self._gradients.begin_micro_batch()

    def reduce(self) -> None:
        """Sums gradients of tied weights over pipeline stages, and reduces all over data- and tensor-parallel peers."""
        self._gradients.reduce(self._tied, self._stages)
        self._sum_over_tensor_parallel()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiplies the reduced gradients."""
        self._gradients.scale(factor)

    def drop_gradients(self) -> None:
        """Drops the gradients of the last iteration."""
        self._gradients.drop()

    def drop_unfinished_iteration(self) -> None:
        """Clears the state of an interrupted iteration."""
        self._gradients.forget()

    @torch.no_grad()
    def gather_weights(self) -> None:
        """All-gathers the updated weights; may be repeated."""
        zero = self._zero
        self._gather(
            groups_flat=zero.bit16_groups_flat,
            partitioned_param_groups=zero.parallel_partitioned_bit16_groups,
            dp_process_group=zero.real_dp_process_group,
            start_alignment_factor=zero.nccl_start_alignment_factor,
            allgather_bucket_size=zero.allgather_bucket_size,
        )

    def _sum_over_tensor_parallel(self) -> None:
        """Sums as megatron-core's ``finalize_model_grads``, which finds no gradients of complete parameters here.

        Tensor-parallel ranks own the same elements, since their parameters have the same shapes.
        """
        group: Any = parallel_state.get_tensor_model_parallel_group()
        if group.size() == 1:
            return
        config = self._chunk.config
        averaged, summed = [], []
        for fragment in self.fragments:
            if getattr(fragment.parameter, "average_gradients_across_tp_domain", False):
                averaged.append(fragment.gradient)
            elif (config.sequence_parallel and getattr(fragment.parameter, "sequence_parallel", False)) or (
                config.qk_layernorm and ("q_layernorm" in fragment.name or "k_layernorm" in fragment.name)
            ):
                summed.append(fragment.gradient)
        for gradients, divisor in ((summed, 1), (averaged, group.size())):
            if gradients:
                together = torch.cat(gradients)  # each is 1-D
                reduced = together.to(self.fragments[0].parameter.device)  # from the host, with offload
                dist.all_reduce(reduced, group=group)
                together.copy_(reduced).div_(divisor)
                for gradient, values in zip(gradients, together.split([one.numel() for one in gradients]), strict=True):
                    gradient.copy_(values)

    # a megatron-core optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Removes the gradients from the inner Adam; the reduced ones are kept."""
        for fragment in self.fragments:
            fragment.master.grad = None

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        """Returns the gradients that count in the norm, without copies from other tensor-parallel ranks or stages."""
        dense, experts = (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
        )
        return [
            fragment.master.grad
            for fragment in self.fragments
            if fragment.master.grad is not None
            and param_is_not_shared(fragment.parameter)
            and param_is_not_tensor_parallel_duplicate(
                fragment.parameter, dense if getattr(fragment.parameter, "allreduce", True) else experts
            )
        ]

    def _copy_model_grads_to_main_grads(self) -> None:
        for fragment in self.fragments:
            fragment.master.grad = fragment.gradient

    def _copy_main_params_to_model_params(self) -> None:
        for weights, masters in self._partitions():
            weights.copy_(masters)

    def _copy_model_params_to_main_params(self, state_dict=None) -> None:
        for weights, masters in self._partitions():
            masters.copy_(weights)

    def _partitions(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        zero = self._zero
        for group, masters in enumerate(zero.single_partition_of_fp32_groups):
            rank = dist.get_rank(zero.real_dp_process_group[group])
            yield zero.parallel_partitioned_bit16_groups[group][rank].detach(), masters.detach()


def _grad_scaler(config: OptimizerConfig) -> MegatronGradScaler | None:
    """Returns the gradient scaler, chosen as in megatron-core."""
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,  # pyright: ignore[reportArgumentType]  # as megatron-core passes it
        hysteresis=config.hysteresis,
    )
