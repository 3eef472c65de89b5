"""A peer: ``torch.distributed.checkpoint``, save and async_save.

The state is weights, masters and moments as plain tensors.  Weights that data-parallel workers hold alike have equal
names, so that torch saves each once and spreads them over the workers; optimizer state is ZeRO-1's slices.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.save_peers import trainer
from benchmarks.save_peers.rounds import Clock, arguments, gather, measure, plan_of, write_result

MODES = ("sync", "thread", "process")


class DcpSaver:
    """Saves with ``dcp.save``, or with ``dcp.async_save`` by a thread or a process of torch's.

    The state is staged into memory that is kept from one save to the next, shared with the process that writes.
    Whatever collectives a thread needs have a group of their own.
    """

    def __init__(self, state: dict, mode: str):
        import torch.distributed as dist
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self._state, self._mode = state, mode
        self._group: Any = dist.new_group(backend="gloo")
        shared = mode == "process"
        self._stager = None
        if mode != "sync":  # there is no device to copy from, so nothing to pin and nothing that overlaps
            self._stager = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_shared_memory=shared,
                    use_async_staging=False,
                    use_non_blocking_copy=False,
                )
            )
        self._future: Any = None
        self._complete = 0.0

    def begin(self, directory: Path) -> None:
        """Saves, or stages the state and starts to write it."""
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

        if self._mode == "sync":
            save(self._state, checkpoint_id=directory, process_group=self._group)
            self._done()
            return
        self._future = async_save(
            self._state,
            checkpoint_id=directory,
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType(self._mode),
            async_stager=self._stager,
        )
        self._future.add_done_callback(self._done)

    def poll(self) -> None:
        """Nothing to do."""

    def finish(self) -> float:
        """Waits for the thread or the process."""
        if self._future is not None:
            self._future.result()
        return self._complete

    def copied_bytes(self) -> int:
        """Bytes that a save of this worker copies in memory: torch stages whole storages."""
        if self._mode == "sync":
            return 0
        storages = {s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in self._state.values())}
        return sum(storages.values())

    def _done(self, future=None) -> None:
        self._complete = time.perf_counter()


def state_dict(chunks, optimizer) -> dict:
    """Views of live memory, by names that say what they are."""
    from megatron.pretraining.engine.state import MegatronState
    from megatron.pretraining.model.parameters import buffer_pieces, parameter_pieces
    from moc.state.detail import Detail

    state = MegatronState(chunks, optimizer)
    # weights come from all who hold them: torch picks one of these
    held = parameter_pieces(chunks) | buffer_pieces(chunks)
    weights = [("param", piece) for pieces in held.values() for piece in pieces]
    slices = [(f.slot, f) for f in state.fragments(state.operators(), Detail.FULL) if f.first_copy]
    return {f"{slot}/{f.name}/{'.'.join(map(str, f.region.offset))}": f.view for slot, f in weights + slices}


def main() -> int:
    """Measures one mode."""
    own, flags = arguments(__doc__, MODES)
    trained = trainer.build(flags)
    saver = DcpSaver(state_dict(trained.chunks, trained.optimizer), own.mode)
    result = measure(saver, Clock(), trained.iterate, plan_of(own))
    result |= {"parameters": trained.parameters, "copied_bytes": sum(gather(saver.copied_bytes()))}
    write_result(own.result, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
