"""``--save`` and ``--load``: checkpoints in Megatron-LM's format, written and read by Megatron-LM's code."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.training import checkpointing, training

from megatron.pretraining.checkpoint import writer
from megatron.pretraining.checkpoint.attempts import Attempts
from megatron.pretraining.checkpoint.unpickling import nothing_runs
from megatron.pretraining.entry.stock import get_args, replaced
from megatron.pretraining.setup import WorkerParts
from moc.errors import with_code
from moc.faults import reach
from moc.files.tree import Tree
from moc.runtime.agreement import first_line, first_reported, gather, run_on_all, run_on_rank0
from moc.snapshot.background import within
from moc.state.record import Position
from moc.store import dense_files
from moc.store.claims import Claim
from moc.store.errors import CheckpointError
from moc.store.fence import Fence

_FAILURES = (AssertionError, RuntimeError, OSError, KeyError, ValueError)
"""What Megatron-LM raises for a checkpoint that it cannot read or write."""


class StockCheckpoints:
    """Saves and loads a worker's state by Megatron-LM's functions; all methods are collective.

    Attributes:
        last_saved: the iteration of the newest checkpoint in ``--save``, if this run has saved or loaded it.
    """

    def __init__(self, parts: WorkerParts):
        self._parts, self._attempts = parts, Attempts(parts.config, parts.log)
        self.last_saved: int | None = None

    @property
    def problem(self) -> str:
        """The error of the last failed save; empty after a success."""
        return self._attempts.problem

    def newest(self, seconds: float | None = None) -> int | None:
        """The iteration that :meth:`load` would resume from; None if it would start at 0, or after ``seconds``."""
        args = get_args()
        if args.load is None or args.finetune:
            return None
        look = functools.partial(dense_files.latest_iteration, args.load)
        return run_on_rank0(lambda: within(seconds, look), "cannot look for a checkpoint")

    def newest_saved(self, seconds: float) -> int:
        """The newest iteration in ``--save``; 0 if there is none, or after ``seconds``; for rank 0."""
        save = get_args().save
        with contextlib.suppress(CheckpointError):  # a save is due then, and reports the error
            return (within(seconds, dense_files.latest_iteration, save) if save else None) or 0
        return 0

    def load(self) -> Position | None:
        """Loads the checkpoint that ``--load`` and ``--pretrained-checkpoint`` name; None on a first start.

        Raises:
            CheckpointError: Megatron-LM cannot load it.
        """
        args, parts = get_args(), self._parts
        args.iteration = args.num_floating_point_operations_so_far = 0
        if args.load is None and args.pretrained_checkpoint is None:
            return None
        for place in filter(None, (args.load, args.pretrained_checkpoint)):
            self._verify(Path(place))
        try:
            with nothing_runs():
                loaded: Any = training.load_checkpoint(
                    parts.chunks, parts.optimizer.core, parts.scheduler, checkpointing_context={}
                )
        except _FAILURES as error:
            place = args.load or args.pretrained_checkpoint
            raise CheckpointError(
                f"{place} cannot be loaded ({type(error).__name__}: {first_line(error)}). Fix: pass another "
                "checkpoint, or the flags that it was saved with",
                code="checkpoint-unloadable",
            ) from error
        args.iteration, args.num_floating_point_operations_so_far = loaded
        parts.modules.take_over()
        if args.iteration == 0:
            return None
        self.last_saved = args.iteration if args.load == args.save else None
        return Position(args.iteration, args.consumed_train_samples)

    def save(self, position: Position) -> None:
        """Saves the state after an iteration.

        Raises:
            CheckpointError: it cannot be written, and ``--save-failure stop`` is given.
        """
        args, parts = get_args(), self._parts
        args.iteration, args.consumed_train_samples = position.iteration, position.consumed_samples
        for chunk in parts.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        root, iteration, world, retain = Path(args.save), position.iteration, parts.world, args.save_retain_interval
        fence = Fence(root, Claim(world.job.id, world.job.term))
        staging = dense_files.staging_of(root, iteration, fence.claim.tag)
        with self._attempts.attempt(iteration, lambda: self.last_saved), self._attempts.reporting():
            run_on_rank0(lambda: _start(root, iteration, fence), "cannot start a checkpoint")
            with _saving_to(staging, root):
                self._write(position)
                reach("persisting")
                self._publish(root, iteration, fence, staging, retain)
            self.last_saved = iteration
            self._attempts.succeeded(iteration)

    def _write(self, position: Position) -> None:
        optimizer: Any = self._parts.optimizer.core
        writer.use_mortal_result_queue()
        # the other workers would wait forever for a first worker that cannot write
        config = writer.first_worker_goes_on(serialization, "save_config")
        with config as failures, writer.first_worker_goes_on(FileSystemWriterAsync, "finish") as more:
            training.save_checkpoint(
                position.iteration,
                self._parts.chunks,
                optimizer,
                self._parts.scheduler,
                get_args().num_floating_point_operations_so_far,
                {},
                train_data_iterator=None,
                preprocess_common_state_dict_fn=training.preprocess_common_state_dict,
            )
        failure = next(iter([*more, *failures]), None)
        if problem := first_reported(None if failure is None else with_code(self._attempts.not_written(failure))):
            raise CheckpointError(problem)

    def _publish(self, root: Path, iteration: int, fence: Fence, staging: Path, retain: int | None) -> None:
        """Publishes what Megatron-LM has written, with size and hash of each file, which the workers share."""
        world = self._parts.world
        names = run_on_rank0(lambda: _gathered(staging, iteration), "cannot read a checkpoint")
        mine: dict[str, dict] = {}

        def describe() -> None:
            for name in names[world.rank :: world.size]:
                mine[name] = dense_files.describe(staging / name)

        run_on_all(describe, "cannot read a checkpoint")
        files = {name: entry for described in gather(mine) for name, entry in described.items()}
        publish = functools.partial(dense_files.publish, root, iteration, files, fence, retain, dense_files.OF_MEGATRON)
        run_on_rank0(publish, "cannot publish a checkpoint")

    def _verify(self, root: Path) -> None:
        """Compares the files of the checkpoint to load with its manifest; one of Megatron-LM's own has none.

        Raises:
            CheckpointError: on all workers: a file is missing or damaged.
        """
        iteration = get_args().ckpt_step or run_on_rank0(lambda: _iteration_in(root), "cannot look for a checkpoint")
        directory = dense_files.directory_of(root, iteration or 0)

        def manifest_there() -> dict | None:  # Megatron-LM looks for other kinds, or reports that there is none
            return dense_files.read_manifest(directory) if directory.is_dir() else None

        manifest = run_on_rank0(manifest_there, "cannot read a checkpoint")
        if manifest is not None:
            mine = dict(sorted(manifest["files"].items())[self._parts.world.rank :: self._parts.world.size])
            if damage := first_reported(dense_files.damage_in(directory, mine)):
                raise dense_files.damaged(damage)

    def tries_again(self) -> bool:
        """Whether a failed save is due again."""
        return self._attempts.due()

    def poll(self) -> None:
        """Completes a save in the background that has ended."""

    def finish(self) -> None:
        """Waits for a save in the background."""

    def close(self) -> None:
        """Abandons a save in the background."""


def _iteration_in(root: Path) -> int | None:
    """The iteration in a tracker file of Megatron-LM; None if it names a release, or does not exist."""
    with contextlib.suppress(CheckpointError):
        return dense_files.latest_iteration(root)
    return None


def _start(root: Path, iteration: int, fence: Fence) -> None:
    dense_files.directory_of(dense_files.start(root, iteration, fence), iteration).mkdir()


def _gathered(staging: Path, iteration: int) -> list[str]:
    """Moves the files of an iteration up from Megatron-LM's directory; returns their paths in the checkpoint."""
    inner = dense_files.directory_of(staging, iteration)
    for entry in [*inner.iterdir()]:
        os.rename(entry, staging / entry.name)
    Tree(staging, ours=True).remove_if_empty(inner.name)
    return sorted(str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file())


@contextlib.contextmanager
def _saving_to(staging: Path, root: Path) -> Iterator[None]:
    """Lets Megatron-LM save to a staging directory; its record for W&B follows, with the final paths."""
    args, records, named = get_args(), [], str(root)
    stock: Any = checkpointing
    with (
        replaced(stock, get_checkpoint_tracker_filename=lambda _: os.devnull),  # publishing writes the tracker
        replaced(stock.wandb_utils, on_save_checkpoint_success=lambda *paths: records.append(paths)),
        replaced(args, save=str(staging), save_retain_interval=None),  # publishing removes old ones
    ):
        yield
    for path, _, _, iteration in records:
        final = path.replace(str(staging), named)
        stock.wandb_utils.on_save_checkpoint_success(final, str(root / dense_files.TRACKER), named, iteration)
