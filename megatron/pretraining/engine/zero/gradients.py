"""Reduces the gradients of an iteration into this rank's partitions of DeepSpeed's ZeRO optimizer.

DeepSpeed's hooks take the gradient of each parameter as backward produces it.  At stage 1 they accumulate it, and the
end of the iteration reduces the sum.  At stage 2 each micro batch is reduced, and only this rank's partition
accumulates.  DeepSpeed is called as for an unknown number of micro batches, and never divides.  Gradients are averaged
here, in fp32, after their sum, since at stage 2 DeepSpeed would divide in the format of the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist


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
        self._begun = False
        self.partitions: list[torch.Tensor] = [self._memory(group) for group in self._groups]

    def begin_micro_batch(self) -> None:
        """Prepares for the hooks of the next backward; at stage 2, ends the previous micro batch."""
        zero = self._zero
        if self._begun and not zero.partition_gradients:
            return  # with a pipeline, forward passes precede the backward passes of others
        if self._begun:
            self._end_micro_batch()
        zero.set_gradient_accumulation_boundary(False)
        zero.clear_backward_seen_flag()
        zero.enter_backward()
        self._begun = True

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
        self._begun = False

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
        self._begun = False

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
