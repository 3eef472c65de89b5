"""Wraps DeepSpeed's ZeRO optimizer as a megatron-core optimizer, with one fp32 chunk per parameter part on this rank.

DeepSpeed flattens each parameter group, and this rank's part of it is one fp32 tensor.  Here the inner Adam receives
one view per model parameter instead of that tensor.  So each parameter has its own moments and update count, skips
updates while it is frozen, and is saved separately.

Reduces the gradients of an iteration into this rank's partitions of DeepSpeed's ZeRO optimizer. DeepSpeed's hooks
take the gradient of each parameter as backward produces it.  At stage 1 they accumulate it, and the end of the
iteration reduces the sum.  At stage 2 each micro batch is reduced, and only this rank's partition accumulates.
DeepSpeed is called as for an unknown number of micro batches, and never divides.  Gradients are averaged here, in
fp32, after their sum, since at stage 2 DeepSpeed would divide in the format of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from megatron.pretraining.engine.sharded import FragmentedOptimizer
from megatron.pretraining.engine.zero.chunk import ZeroChunk


class PartitionedGradients:
    """Reduced gradients, at fixed memory addresses.

    Args:
        zero: DeepSpeed's ``DeepSpeedZeroOptimizer``, with ``gradient_average=False``.
        average_over: data-parallel workers to average over; 1 for sums.

    Attributes:
        partitions: this rank's part of the flattened gradients of each parameter group, fp32.
    """

    def __init__(self, zero: Any, average_over: int):
        self._zero, self._average_over = zero, average_over
        self._groups = range(len(zero.bit16_groups))
        self._has_micro_batch = False
        self.partitions: list[torch.Tensor] = [self._memory(group) for group in self._groups]

    def begin_micro_batch(self) -> None:
        """Prepares for the hooks of the next backward; at stage 2, ends the previous micro batch."""
        zero = self._zero
        if self._has_micro_batch and not zero.partition_gradients:
            return  # with a pipeline, forward passes precede the backward passes of others
        if self._has_micro_batch:
            self._end_micro_batch()
        zero.set_gradient_accumulation_boundary(False)
        zero.clear_backward_seen_flag()
        zero.enter_backward()
        self._has_micro_batch = True

    def reduce(self, tied: Iterable[torch.nn.Parameter] = (), peers: Any = None) -> None:
        """Reduces the remaining gradients into :attr:`partitions`; a collective call of data-parallel peers.

        Args:
            tied: weights that this pipeline stage shares with another; only at stage 1.
            peers: process group of these stages, over which the gradients of such weights are summed first.
        """
        zero = self._zero
        if zero.partition_gradients:
            self._end_micro_batch()
            zero.finalize_gradient_accumulation_boundary()
        else:
            zero.set_gradient_accumulation_boundary(True)
            zero.backward_epilogue()
            for parameter in tied:
                if (gradient := zero.get_gradient_for_reduction(parameter)) is not None:  # None if frozen
                    dist.all_reduce(gradient, group=peers)
            zero.reduce_gradients()
            zero.exit_backward()
        zero.zero_grad(set_to_none=True)  # the full gradients
        if zero.cpu_offload:
            zero._wait_for_offload_copies()
        for group in self._groups:
            self._collect(group)
        self.scale(1.0 / self._average_over)
        self._has_micro_batch = False

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiplies all gradients."""
        if isinstance(factor, torch.Tensor) or factor != 1.0:
            for partition in self.partitions:
                partition.mul_(factor.to(partition.device) if isinstance(factor, torch.Tensor) else factor)

    def drop(self) -> None:
        """Resets the gradients to their state before the first micro batch."""
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        zero.micro_step_id = -1  # as after DeepSpeed's own step(), which is not called
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
            zero._offload_accumulated_param_ids.clear()
        for partition in self.partitions:
            partition.zero_()
        self._has_micro_batch = False

    def forget(self) -> None:
        """Clears the state of an interrupted backward or reduction in DeepSpeed's objects."""
        zero = self._zero
        for bucket in zero.ipg_buckets.values():
            bucket.clear()
            bucket.buffer.clear()
            bucket.index = 0
        zero.extra_large_param_to_reduce.clear()
        zero.previous_reduced_grads.clear()
        zero.params_already_reduced = [False] * len(zero.params_already_reduced)
        zero._pending_offload_events.clear()
        zero._release_ipg_buffers()
        zero._backward_hook_state.backward_active_depth = 0
        zero._backward_hook_state.reset_for_new_step()
        for group in self._groups:
            zero.all_grad_tensors[group] = None
        self.drop()

    def _end_micro_batch(self) -> None:
        self._zero.overlapping_partition_gradients_reduce_epilogue()
        self._zero.backward_epilogue()
        self._zero.exit_backward()

    def _memory(self, group: int) -> torch.Tensor:
        """Returns the memory of a group's reduced gradients: DeepSpeed's accumulator, if it is one fp32 tensor."""
        zero = self._zero
        master = zero.single_partition_of_fp32_groups[group]
        if zero.cpu_offload:
            return master.grad
        if zero._use_compact_grad_partition_buffer(group):
            return zero._get_compact_grad_partition_buffer(group).flat_partition
        return torch.zeros_like(master, requires_grad=False)

    def _collect(self, group: int) -> None:
        """Copies the reduced gradients of a group to their memory, if they are outside it, and frees the originals."""
        zero = self._zero
        if not zero.cpu_offload and zero._use_compact_grad_partition_buffer(group):
            return
        if not zero.cpu_offload:
            self._copy(zero.averaged_gradients[group], self.partitions[group])
        zero.averaged_gradients[group] = zero.all_grad_tensors[group] = None

    @staticmethod
    def _copy(parts: Iterator[torch.Tensor], partition: torch.Tensor) -> None:
        start = 0
        for part in parts:
            partition[start : start + part.numel()].copy_(part.view(-1))
            start += part.numel()


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
        starts: by parameter, the first index of its part.
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
        self._tied = [
            parameter for parameter in chunk.parameters() if several and getattr(parameter, "shared_embedding", False)
        ]
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
                    local_range = slice(begin - first, end - first)
                    settings["params"].append(masters[local_range])
                    name = zero.param_names[parameter]
                    yield ZeroFragment(name, parameter, begin - offset, settings["params"][-1], gradients[local_range])

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
                flat = torch.cat(gradients)  # each is 1-D
                reduced = flat.to(self.fragments[0].parameter.device)  # from the host, with offload
                dist.all_reduce(reduced, group=group)
                flat.copy_(reduced).div_(divisor)
                for gradient, values in zip(gradients, flat.split([part.numel() for part in gradients]), strict=True):
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
