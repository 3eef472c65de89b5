"""``--save`` and ``--load``: checkpoints in Megatron-LM's format, written and read by Megatron-LM's code."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from megatron.training import training

from megatron.pretraining.checkpoint.unpickling import nothing_runs
from megatron.pretraining.entry.stock import get_args
from megatron.pretraining.setup import WorkerParts
from moc.runtime.agreement import first_line, run_on_rank0
from moc.snapshot.background import within
from moc.state.record import Position
from moc.store import dense_files
from moc.store.errors import CheckpointError

_FAILURES = (AssertionError, RuntimeError, OSError, KeyError, ValueError)
"""What Megatron-LM raises for a checkpoint that it cannot read or write."""


class StockCheckpoints:
    """Saves and loads a worker's state by Megatron-LM's functions; all methods are collective.

    Attributes:
        problem: the error of the last failed save.
        last_saved: the iteration of the newest checkpoint in ``--save``, if this run has saved or loaded it.
    """

    def __init__(self, parts: WorkerParts):
        self._parts = parts
        self.problem = ""
        self.last_saved: int | None = None

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
        optimizer: Any = parts.optimizer.core
        try:
            training.save_checkpoint(
                position.iteration,
                parts.chunks,
                optimizer,
                parts.scheduler,
                args.num_floating_point_operations_so_far,
                {},
                train_data_iterator=None,
                preprocess_common_state_dict_fn=training.preprocess_common_state_dict,
            )
        except OSError as error:
            self.problem = f"{args.save} cannot be written ({error.strerror or first_line(error)})"
            raise CheckpointError(self.problem) from error
        self.problem, self.last_saved = "", position.iteration

    def tries_again(self) -> bool:
        """Whether a failed save is due again."""
        return False

    def poll(self) -> None:
        """Completes a save in the background that has ended."""

    def finish(self) -> None:
        """Waits for a save in the background."""

    def close(self) -> None:
        """Abandons a save in the background."""
