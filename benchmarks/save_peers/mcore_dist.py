"""Measures a peer: megatron-core's ``dist_checkpointing`` of weights and optimizer, blocking and asynchronous.

It has Megatron-LM's fast settings: saving spread over data-parallel workers, a cached plan, and the optimizer's layout
without communication (``dp_reshardable``).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.save_peers.rounds import arguments, write_result
from benchmarks.save_peers.trainer import measured_peer

MODES = ("sync", "async")


class DistSaver:
    """Saves with ``dist_checkpointing.save``; asynchronously with a forked process, as ``AsyncCallsQueue`` does."""

    def __init__(self, chunks, optimizer, mode: str):
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
        self._strategy = FullyParallelSaveStrategyWrapper(strategy, group, do_cache_distribution=True)
        self._chunks, self._optimizer, self._mode = chunks, optimizer, mode
        self._queue, self._first, self._complete = AsyncCallsQueue(), True, 0.0

    def begin(self, directory: Path) -> None:
        """Saves, or plans the save and forks the writer process."""
        from megatron.core import dist_checkpointing

        asynchronous = self._mode == "async"
        how: dict[str, Any] = dict(validate_access_integrity=self._first, async_sharded_save=asynchronous)
        how |= dict(sharded_strategy=self._strategy, async_strategy="mcore")
        request = dist_checkpointing.save(self._state(), str(directory), **how)
        self._first = False
        if asynchronous:
            assert request is not None
            self._queue.schedule_async_request(request)
        else:
            self._complete = time.perf_counter()

    def poll(self) -> None:
        """Completes a checkpoint that all workers have written."""
        if self._queue.maybe_finalize_async_calls(blocking=False):
            self._complete = time.perf_counter()

    def finish(self) -> float:
        """Waits for the writer processes; returns the time of completion."""
        if self._queue.maybe_finalize_async_calls(blocking=True):
            self._complete = time.perf_counter()
        return self._complete

    def copied_bytes(self) -> int:
        """Returns 0: the tensors are in host memory, so nothing is staged."""
        return 0

    def _state(self) -> dict:
        from megatron.core import parallel_state

        from megatron.pretraining.model.parameters import unwrap

        metadata = {
            "distrib_optim_sharding_type": "dp_reshardable",
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = unwrap(self._chunks[0]).sharded_state_dict(metadata=metadata)
        return {"model": model, "optimizer": self._optimizer.sharded_state_dict(model, metadata=metadata)}


def main() -> int:
    """Measures one mode."""
    own, flags = arguments(__doc__, MODES)
    write_result(own.result, measured_peer(own, flags, DistSaver))
    return 0


if __name__ == "__main__":
    sys.exit(main())
