"""Defines a model chunk whose gradients DeepSpeed reduces, in place of ``DistributedDataParallel``."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule


class Reducing(Protocol):
    """Methods that a chunk requires of the optimizer that reduces its gradients."""

    def begin_micro_batch(self) -> None:
        """Prepares for the forward pass of a micro batch."""

    def reduce(self) -> None:
        """Reduces the gradients of the iteration."""

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiplies the reduced gradients."""

    def drop_gradients(self) -> None:
        """Drops the gradients of the last iteration."""

    def drop_unfinished_iteration(self) -> None:
        """Clears the state of an interrupted iteration."""

    def gather_weights(self) -> None:
        """All-gathers the weights that data-parallel peers have updated."""


class ZeroChunk(MegatronModule):
    """Megatron-core's interface of a data-parallel model chunk, over DeepSpeed's optimizer.

    Attributes:
        reducer: the optimizer, once it is built.
    """

    def __init__(self, core_config: TransformerConfig, module: torch.nn.Module):
        super().__init__(core_config)
        self.module = module
        self.ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.dp_cp_group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.dp_group: Any = parallel_state.get_data_parallel_group()
        self.expt_dp_group: Any = parallel_state.get_expert_data_parallel_group()
        self.bucket_groups, self.expert_parallel_bucket_groups = [], []  # DeepSpeed has its own
        self.reducer: Reducing

    def forward(self, *inputs, **kwargs):
        """Computes forward of a micro batch; without gradients, it is an evaluation."""
        if torch.is_grad_enabled():
            self.reducer.begin_micro_batch()
        return self.module(*inputs, **kwargs)

    def zero_grad_buffer(self) -> None:
        """Drops the gradients of the last iteration."""
        self.reducer.drop_gradients()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduces the gradients of the iteration."""
        self.reducer.reduce()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiplies the reduced gradients."""
        self.reducer.scale_gradients(scaling_factor)

    def start_param_sync(self, *unused, force_sync: bool = False, **ignored) -> None:
        """All-gathers the weights that data-parallel peers have updated; may be repeated."""
        self.reducer.gather_weights()
