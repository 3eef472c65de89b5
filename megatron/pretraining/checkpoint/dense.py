"""``--save`` and ``--load``: dense checkpoints that any layout loads and stock Megatron-LM reads.

A checkpoint is a directory ``iter_0000100`` with

* the weights in megatron-core's ``torch_dist`` format, as Megatron-LM writes them;
* ``optimizer/*.safetensors``: master weights and moments as boxes of the unpartitioned tensors (:mod:`moc.store`),
  since megatron-core's own optimizer checkpoints lose Adam's step without Transformer Engine and cannot change the
  expert-parallel size;
* ``training_state.json``: position, learning-rate schedule, loss scale, model and tokenizer;
* ``manifest.json``: every file with its hash, written last.

No random state is saved: it is a function of the iteration.  Only megatron-core's ``torch_dist`` reader unpickles
anything, and nothing in it runs (:mod:`megatron.pretraining.checkpoint.unpickling`).
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.pretraining.checkpoint import contents, fragments, writer
from megatron.pretraining.checkpoint.background import Saves
from megatron.pretraining.checkpoint.loading import CheckpointLoader
from megatron.pretraining.config import Config
from megatron.pretraining.data.tokenizer import Vocabulary
from megatron.pretraining.engine.module_state import ModuleState
from megatron.pretraining.engine.optimizer import VotedOptimizer
from megatron.pretraining.logging.records import Records
from moc.runtime.agreement import run_on_rank0
from moc.runtime.world import World
from moc.snapshot.background import within
from moc.state.record import Position
from moc.store import dense_files
from moc.store.durable import write_durably


class Checkpoints(Saves):
    """Saves and loads the state of this worker's model and optimizer; all methods are collective."""

    def __init__(
        self,
        config: Config,
        world: World,
        chunks: list[DistributedDataParallel],
        modules: ModuleState,
        optimizer: VotedOptimizer,
        scheduler: OptimizerParamScheduler,
        vocabulary: Vocabulary,
        log: Records,
    ):
        super().__init__(config, world, log)
        self._chunks, self._say = chunks, log.message
        self._modules, self._optimizer, self._scheduler, self._vocabulary = modules, optimizer, scheduler, vocabulary

    def newest(self, seconds: float | None = None) -> int | None:
        """The iteration that :meth:`load` would resume from; None if it would start at 0, or after ``seconds``."""
        checkpoint = self._config.checkpoint
        if checkpoint.load is None or checkpoint.finetune:
            return None
        look = functools.partial(dense_files.latest_iteration, checkpoint.load)
        if checkpoint.ckpt_step is not None:
            directory = dense_files.directory_of(checkpoint.load, checkpoint.ckpt_step)
            look = lambda: checkpoint.ckpt_step if directory.is_dir() else None  # noqa: E731
        return run_on_rank0(lambda: within(seconds, look), "cannot look for a checkpoint")

    def load(self) -> Position | None:
        """Loads the checkpoint that ``--load`` and ``--ckpt-step`` name; returns None on a first start.

        Raises:
            CheckpointError: on all workers: no checkpoint although ``--exit-on-missing-checkpoint`` or ``--ckpt-step``
                requires one, a file missing or damaged, another model, or state missing.
        """
        parts = self._chunks, self._modules, self._optimizer, self._scheduler
        loader = CheckpointLoader(self._config, self._world, *parts, self._say)
        directory = loader.find()
        if directory is None:
            return None
        position = loader.load(directory)
        save = self._config.checkpoint.save
        if save and dense_files.directory_of(save, position.iteration).resolve() == directory.resolve():
            self.last_saved = position.iteration
        return position

    def request(self, position: Position, staging: Path) -> AsyncRequest:
        """See :class:`Saves`."""
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        described = {"checkpoint_version": 3.0, "iteration": position.iteration}
        weights = contents.described_weights(self._chunks) | described
        strategy = self._strategy()
        how: dict[str, Any] = dict(sharded_strategy=strategy, async_sharded_save=True, async_strategy="mcore")
        request: Any = dist_checkpointing.save(weights, str(staging), **how)
        run_on_rank0(lambda: self._write_state(staging, position), "cannot write a checkpoint")
        saves = self._config.checkpoint.save_optim
        entries = fragments.entries_of(self._chunks, self._optimizer) if saves else None
        write = functools.partial(writer.write_files, request.async_fn, staging, self._world.rank, entries)
        *gathering, _ = request.finalize_fns  # the last one hangs all other workers if rank 0 cannot write
        finalize = [functools.partial(self.together, one, (FileSystemWriterAsync, "finish")) for one in gathering]
        config = functools.partial(
            run_on_rank0, lambda: writer.write_config(strategy, staging), "cannot end a checkpoint"
        )
        return request._replace(async_fn=write, finalize_fns=[*finalize, config])

    def _strategy(self):
        writer.use_mortal_result_queue()
        strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
        group: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return FullyParallelSaveStrategyWrapper(strategy, group)

    def _write_state(self, staging: Path, position: Position) -> None:
        described = contents.describe(self._config, self._vocabulary.tokens)
        state = contents.training_state(
            self._config, self._world, position, self._optimizer, self._scheduler, described
        )
        write_durably(staging / dense_files.STATE, json.dumps(state, indent=1))
