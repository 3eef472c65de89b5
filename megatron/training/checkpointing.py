"""``--save`` and ``--load``: dense checkpoints that any layout loads and stock Megatron-LM reads.

A checkpoint is a directory ``iter_0000100`` with

* the weights in megatron-core's ``torch_dist`` format, as Megatron-LM writes them;
* ``optimizer/*.safetensors``: master weights and moments as boxes of the unpartitioned tensors (:mod:`moc.store`),
  since megatron-core's own optimizer checkpoints lose Adam's step without Transformer Engine and refuse to change
  the expert-parallel size;
* ``training_state.json``: position, learning-rate schedule, loss scale, and the shape of the model;
* ``manifest.json``: every file with its hash, written last.

No random state is saved: it follows from the iteration.  Nothing is unpickled but what megatron-core's reader of
``torch_dist`` unpickles, after its hash was verified.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.distributed.checkpoint.api import CheckpointException

from megatron.training import checkpoint_contents as contents
from megatron.training import checkpoint_files as files
from megatron.training import checkpoint_writer as writer
from megatron.training.agreement import first_line, on_first
from megatron.training.checkpoint_contents import Position
from megatron.training.checkpoint_files import CheckpointError
from megatron.training.checkpoint_loading import CheckpointLoader
from megatron.training.config import Config
from megatron.training.initialize import World
from megatron.training.optimizer import VotedOptimizer
from moc.state.fragments import optimizer_fragments
from moc.store.regions import RegionTensor


class Checkpoints:
    """Saves and loads the state of this worker's model and optimizer; all methods are collective.

    Args:
        config: the flags in force.
        world: this worker's place.
        chunks: the model.
        optimizer: its optimizer.
        scheduler: its learning-rate schedule.
        say: prints a line on the first worker.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        chunks: list[DistributedDataParallel],
        optimizer: VotedOptimizer,
        scheduler: OptimizerParamScheduler,
        say: Callable[[str], None],
    ):
        self._config, self._world, self._chunks, self._say = config, world, chunks, say
        self._optimizer, self._scheduler = optimizer, scheduler
        self._queue = AsyncCallsQueue()
        self.last_saved: int | None = None

    def newest(self) -> int | None:
        """The iteration that :meth:`load` would go on from; None if it would begin at 0, or find nothing."""
        checkpoint = self._config.checkpoint
        if checkpoint.load is None or checkpoint.finetune:
            return None
        look = functools.partial(files.latest_iteration, checkpoint.load)
        if checkpoint.ckpt_step is not None:
            directory = files.directory_of(checkpoint.load, checkpoint.ckpt_step)
            look = lambda: checkpoint.ckpt_step if directory.is_dir() else None  # noqa: E731
        return on_first(look, "cannot look for a checkpoint")

    def load(self) -> Position | None:
        """Loads what ``--load`` and ``--ckpt-step`` name.

        Returns:
            Where to go on, or None if ``--load`` holds no checkpoint yet (a first start).

        Raises:
            CheckpointError: on all workers alike: nothing to load although ``--exit-on-missing-checkpoint`` or
                ``--ckpt-step`` asks for it, a file missing or damaged, another model, state missing.
        """
        parts = self._config, self._world, self._chunks, self._optimizer, self._scheduler, self._say
        loader = CheckpointLoader(*parts)
        directory = loader.find()
        if directory is None:
            return None
        position = loader.load(directory)
        save = self._config.checkpoint.save
        if save and files.directory_of(save, position.iteration).resolve() == directory.resolve():
            self.last_saved = position.iteration
        return position

    def save(self, position: Position) -> None:
        """Saves, or with ``--async-save`` starts to; an earlier save still under way is waited for.

        Raises:
            CheckpointError: on all workers, if any cannot write; earlier checkpoints are untouched.
        """
        self.finish()
        root, iteration = Path(self._config.checkpoint.save), position.iteration
        on_first(lambda: files.start(root, iteration), "cannot start a checkpoint")
        staging = files.staging_of(root, iteration)
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        weights = contents.described_weights(self._chunks) | {"checkpoint_version": 3.0, "iteration": iteration}
        with self._reporting_failure():
            request = dist_checkpointing.save(weights, str(staging), self._strategy(), async_sharded_save=True)
        on_first(lambda: self._write_state(staging, position), "cannot write a checkpoint")
        entries = self._optimizer_entries() if self._config.checkpoint.save_optim else None
        write = functools.partial(writer.write_files, request.async_fn, staging, self._world.rank, entries)
        publish = functools.partial(self._publish, root, iteration)
        self._queue.schedule_async_request(
            request._replace(async_fn=write, finalize_fns=[*request.finalize_fns, publish])
        )
        self.last_saved = iteration
        if not self._config.checkpoint.async_save:
            self.finish()

    def poll(self) -> None:
        """Publishes a checkpoint that all workers have finished writing; returns at once otherwise."""
        self._finalize(blocking=False)

    def finish(self) -> None:
        """Waits for a save under way, and publishes it."""
        self._finalize(blocking=True)

    def close(self) -> None:
        """Gives up a save under way, as if this worker had been killed; asks nothing of the others."""
        while self._queue.async_calls:
            self._queue.async_calls.popleft().async_caller.close(abort=True)

    def _finalize(self, blocking: bool) -> None:
        with self._reporting_failure():
            self._queue.maybe_finalize_async_calls(blocking=blocking)

    @contextlib.contextmanager
    def _reporting_failure(self):
        """Makes one sentence of what megatron-core and torch raise where files cannot be written."""
        try:
            yield
        except CheckpointError:
            raise
        except (CheckpointingException, CheckpointException, OSError, RuntimeError) as error:
            failures = getattr(error, "failures", None)  # of all workers; the first one knows them
            reason = next(iter(failures.values()))[0] if failures else error
            raise CheckpointError(
                f"the checkpoint in {self._config.checkpoint.save} could not be written; earlier ones are untouched: "
                f"make room or repair the disk, and start again ({first_line(reason)})"
            ) from error

    def _publish(self, root: Path, iteration: int) -> None:
        retain = self._config.checkpoint.save_retain_interval
        on_first(lambda: writer.publish(root, iteration, self._world.size, retain), "cannot complete a checkpoint")
        self._say(f"saved checkpoint at iteration {iteration} to {root}")

    def _strategy(self):
        writer.use_mortal_result_queue()
        strategy = get_default_save_sharded_strategy("torch_dist", 1)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return FullyParallelSaveStrategyWrapper(strategy, group)

    def _write_state(self, staging: Path, position: Position) -> None:
        state = contents.training_state(self._config, self._world, position, self._optimizer, self._scheduler)
        files.write_durably(staging / files.STATE, json.dumps(state, indent=1))

    def _optimizer_entries(self) -> list[RegionTensor]:
        """This rank's share of the optimizer state, on the host: forked writers cannot read the device."""
        return [
            RegionTensor(f.name, f.slot, f.global_shape, f.region, f.view.cpu())
            for f in optimizer_fragments(self._chunks, self._optimizer.core)
            if f.first_copy
        ]
