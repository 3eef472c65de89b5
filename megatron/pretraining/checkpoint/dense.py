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

import contextlib
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from megatron.pretraining.checkpoint import contents, writer
from megatron.pretraining.checkpoint.attempts import Attempts
from megatron.pretraining.checkpoint.loading import CheckpointLoader
from megatron.pretraining.config import Config
from megatron.pretraining.data.tokenizer import Vocabulary
from megatron.pretraining.engine.module_state import ModuleState
from megatron.pretraining.engine.optimizer import VotedOptimizer
from megatron.pretraining.engine.state import optimizer_fragments
from megatron.pretraining.logging.records import Records
from moc.errors import with_code
from moc.runtime.agreement import first_reported, run_on_rank0
from moc.runtime.groups import Aborted, Suspicion
from moc.runtime.world import World
from moc.snapshot.background import within
from moc.state.record import Position
from moc.store import dense_files
from moc.store.claims import Claim
from moc.store.durable import write_durably
from moc.store.errors import CheckpointError
from moc.store.fence import Fence
from moc.store.regions import RegionTensor


class Checkpoints:
    """Saves and loads the state of this worker's model and optimizer; all methods are collective.

    With ``--save-failure continue``, a failed save (which fails on all workers together) is reported and retried.
    """

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
        self._config, self._world, self._chunks, self._log, self._say = config, world, chunks, log, log.message
        self._modules, self._optimizer, self._scheduler, self._vocabulary = modules, optimizer, scheduler, vocabulary
        self._queue = AsyncCallsQueue()
        self._fence = _fence(config, world)
        self._attempts = Attempts(config, log)
        self.last_saved: int | None = None
        self._before: int | None = None  # value of last_saved before the save under way

    @property
    def problem(self) -> str:
        """The error of the last failed save; empty after a success."""
        return self._attempts.problem

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

    def newest_saved(self, seconds: float) -> int:
        """The iteration of the newest checkpoint in ``--save``; 0 if there is none, or none is found in ``seconds``."""
        save = self._config.checkpoint.save
        with contextlib.suppress(CheckpointError):  # a save is due then, and reports the error
            return (within(seconds, dense_files.latest_iteration, save) if save else None) or 0
        return 0

    def save(self, position: Position) -> None:
        """Saves, or with ``--async-save`` starts to; waits for an earlier save first.

        Raises:
            CheckpointError: on all workers, with ``--save-failure stop``, if any cannot write; earlier checkpoints are
                untouched.
        """
        self.finish()
        with self._attempts.attempt(position.iteration, self._give_up(position.iteration)):
            self._save(position)

    def tries_again(self) -> bool:
        """Whether to retry a failed save now; collective only after a failure."""
        return self._attempts.due()

    def _save(self, position: Position) -> None:
        save, fence = self._config.checkpoint.save, self._fence
        assert save is not None and fence is not None  # required for saving
        root, iteration = Path(save), position.iteration
        run_on_rank0(lambda: dense_files.start(root, iteration, fence), "cannot start a checkpoint")
        staging = dense_files.staging_of(root, iteration, fence.claim.tag)
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        weights = contents.described_weights(self._chunks) | {"checkpoint_version": 3.0, "iteration": iteration}
        strategy = self._strategy()
        with self._attempts.reporting():
            how: dict[str, Any] = dict(sharded_strategy=strategy, async_sharded_save=True, async_strategy="mcore")
            request: Any = dist_checkpointing.save(weights, str(staging), **how)
        run_on_rank0(lambda: self._write_state(staging, position), "cannot write a checkpoint")
        entries = self._optimizer_entries() if self._config.checkpoint.save_optim else None
        write = functools.partial(writer.write_files, request.async_fn, staging, self._world.rank, entries)
        *gathering, _ = request.finalize_fns  # the last one hangs all other workers if rank 0 cannot write
        finalize = [functools.partial(self._together, one) for one in gathering]
        config = functools.partial(
            run_on_rank0, lambda: writer.write_config(strategy, staging), "cannot end a checkpoint"
        )
        publish = functools.partial(self._publish, root, iteration)
        self._queue.schedule_async_request(request._replace(async_fn=write, finalize_fns=[*finalize, config, publish]))
        self._before, self.last_saved = self.last_saved, iteration
        if not self._config.checkpoint.async_save:
            self._finalize(blocking=True)

    def poll(self) -> None:
        """Publishes the checkpoint if all workers have finished writing it; returns at once otherwise."""
        if self._queue.async_calls:
            with self._attempts.attempt(self.last_saved, self._give_up(self.last_saved)):
                self._finalize(blocking=False)

    def finish(self) -> None:
        """Waits for a save under way, and publishes it."""
        if self._queue.async_calls:
            with self._attempts.attempt(self.last_saved, self._give_up(self.last_saved)):
                self._finalize(blocking=True)

    def close(self) -> None:
        """Abandons a save under way, as if this worker had been killed; does not communicate."""
        while self._queue.async_calls:
            self._queue.async_calls.popleft().async_caller.close(abort=True)
        writer.forget_results()

    def _give_up(self, iteration: int | None) -> Callable[[], int | None]:
        def give_up() -> int | None:
            self.close()
            if self.last_saved == iteration:
                self.last_saved = self._before
            return self.last_saved

        return give_up

    def _finalize(self, blocking: bool) -> None:
        with self._attempts.reporting():
            self._queue.maybe_finalize_async_calls()
            pause_s = 0.01
            while blocking and self._queue.async_calls:  # polled: a worker stuck in storage must notice a lost worker
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.1)
                self._queue.maybe_finalize_async_calls()

    def _together(self, finalize: Callable[[], None]) -> None:
        """Runs a finalizer of megatron-core that may fail on one worker; a failure raises on all."""
        failure, wrote = None, writer.first_worker_goes_on(FileSystemWriterAsync, "finish")
        try:
            with wrote as failures:
                finalize()
            failure = next(iter(failures), None)
        except (CheckpointingException, CheckpointException, OSError, RuntimeError) as error:
            if isinstance(error, (Aborted, Suspicion)):
                raise
            failure = error
        self._agree(failure)

    def _agree(self, failure: BaseException | None) -> None:
        if problem := first_reported(None if failure is None else with_code(self._attempts.not_written(failure))):
            raise CheckpointError(problem)

    def _publish(self, root: Path, iteration: int) -> None:
        retain = self._config.checkpoint.save_retain_interval
        complete = functools.partial(writer.publish, root, iteration, self._world.size, retain, self._fence)
        run_on_rank0(complete, "cannot complete a checkpoint")
        self._attempts.succeeded(iteration)

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

    def _optimizer_entries(self) -> list[RegionTensor]:
        """This rank's share of the optimizer state, on the host, since forked writers cannot read the device."""
        return [
            RegionTensor(f.name, f.slot, f.global_shape, f.region, f.view.cpu())
            for f in optimizer_fragments(self._chunks, self._optimizer.core)
            if f.first_copy
        ]


def _fence(config: Config, world: World) -> Fence | None:
    """The fence that guards this generation's saves; neither reads nor writes anything yet."""
    save = config.checkpoint.save
    return None if save is None else Fence(Path(save), Claim(world.job.id, world.job.term))
