"""Clears the state that an interrupted iteration leaves in megatron-core's objects."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallel

from megatron.pretraining.engine.module_state import ModuleState
from megatron.pretraining.engine.zero.chunk import ZeroChunk


def drop_unfinished_iteration(chunks: list[DistributedDataParallel], modules: ModuleState) -> None:
    """Resets everything except parameters and optimizer state to its value between two iterations.

    Gradients need no reset, since every iteration starts by zeroing them; random streams and data are functions of
    the position.
    """
    modules.suspend()
    for chunk in chunks:
        if isinstance(chunk, ZeroChunk):
            chunk.reducer.drop_unfinished_iteration()
        for buckets in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            _forget_reductions(buckets)


def _forget_reductions(buckets) -> None:
    buckets.grad_reduce_handle = buckets.param_gather_handle = None
    buckets.param_gather_dispatched = False
    buckets.per_param_grad_ready_counts = {}
    buckets.is_last_microbatch = True
