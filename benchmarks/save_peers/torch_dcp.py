"""Measures a peer: ``torch.distributed.checkpoint``, save and async_save.

The state is weights, masters and moments as plain tensors. Identical weights of data-parallel workers have the same
name, so torch saves each once and spreads them over the workers. Optimizer state is ZeRO-1's shards.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.save_peers.rounds import Saver, arguments, write_result
from benchmarks.save_peers.trainer import measured_peer

MODES = ("sync", "thread", "process")


class DcpSaver(Saver):
    """Saves with ``dcp.save``, or with ``dcp.async_save`` in a thread or process of torch.

    The state is staged into memory that is kept between saves and shared with the writer process. A thread's
    collectives use their own group.
    """

    def __init__(self, state: dict, mode: str):
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._state, self._mode = state, mode
        self._group: Any = dist.new_group(backend="gloo")
        self._stager = None
        if mode != "sync":  # without a device there is nothing to pin or overlap
            off = dict.fromkeys(("use_pinned_memory", "use_async_staging", "use_non_blocking_copy"), False)
            self._stager = DefaultStager(StagingOptions(use_shared_memory=mode == "process", **off))
        self._future: Any = None
        self._complete = 0.0

    def begin(self, directory: Path) -> None:
        """Saves, or stages the state and starts to write it."""
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

        where: dict[str, Any] = dict(checkpoint_id=directory, process_group=self._group)
        if self._mode == "sync":
            save(self._state, **where)
            self._done()
            return
        where |= dict(async_checkpointer_type=AsyncCheckpointerType(self._mode), async_stager=self._stager)
        self._future = async_save(self._state, **where)
        self._future.add_done_callback(self._done)

    def finish(self) -> float:
        """Waits for the thread or process; returns the time of completion."""
        if self._future is not None:
            self._future.result()
        return self._complete

    def copied_bytes(self) -> int:
        """Returns the bytes that a save of this worker copies in memory: torch stages complete storages."""
        if self._mode == "sync":
            return 0
        storages = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in self._state.values())}
        return sum(storages.values())

    def _done(self, future=None) -> None:
        self._complete = time.perf_counter()


def state_dict(chunks, optimizer) -> dict:
    """Returns views of live memory by a name of optimizer-state key, parameter and offset."""
    from megatron.pretraining.engine.module_state import ModuleState
    from megatron.pretraining.engine.state import MegatronState
    from megatron.pretraining.model.parameters import buffer_pieces, parameter_pieces
    from moc.state.operators import Detail

    state = MegatronState(chunks, optimizer, ModuleState(chunks))
    # All holders provide the weights: torch picks one of them.
    held = parameter_pieces(chunks) | buffer_pieces(chunks)
    weights = [("param", piece) for pieces in held.values() for piece in pieces]
    slices = [(f.slot, f) for f in state.fragments(state.operators(), Detail.FULL) if f.first_copy]
    return {f"{slot}/{f.name}/{'.'.join(map(str, f.region.offset))}": f.view for slot, f in weights + slices}


def main() -> int:
    """Measures one mode."""
    own, flags = arguments(__doc__, MODES)
    saver_of = lambda chunks, optimizer, mode: DcpSaver(state_dict(chunks, optimizer), mode)  # noqa: E731
    write_result(own.result, measured_peer(own, flags, saver_of))
    return 0


if __name__ == "__main__":
    sys.exit(main())
