"""Fault tolerance for the Trainer of Hugging Face transformers (docs/how-to/own-loop.md).

    moc.transformers.init()                                  # before TrainingArguments
    trainer = moc.transformers.FaultTolerantTrainer(model=model, args=args, train_dataset=data,
                                                    protection={"policy": "full", "directory": "snapshots"})
    trainer.train()

The Trainer works as in one process: :mod:`moc.torch` deals out the batches and averages the gradients.  The Trainer's
optimizer commits each update.  After the loss of a worker, it repeats the iterations that were lost before it returns,
so that the Trainer's counters never go back.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from accelerate import PartialState
from torch.utils.data import Dataset, IterableDataset
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from moc.runtime.job import Job
from moc.session.settings import SettingsError
from moc.torch import PositionError, protect
from moc.torch.frameworks import Stepping, do_nothing, join_alone, joined_job, shared_loader


def init(**options: Any) -> Job:
    """Joins the job; called before ``TrainingArguments``; returns the job, with ``rank`` and ``size``.

    Args:
        options: arguments of :func:`moc.torch.init`.
    """
    return join_alone(**options)


class FaultTolerance:
    """Base class that protects any subclass of ``transformers.Trainer``; it precedes the Trainer among the bases.

    ``per_device_train_batch_size`` and ``gradient_accumulation_steps`` count for each worker.  Batches of an epoch that
    do not make up a complete iteration are left out.  Only rank 0 logs and saves.

    Args:
        arguments: arguments of the Trainer.
        protection: arguments of :func:`moc.torch.protect`, such as policy, tier and directory.
        keywords: arguments of the Trainer.

    Raises:
        SettingsError: :func:`init` was not called before ``TrainingArguments``.
        PositionError: the training data have no position.
    """

    def __init__(self, *arguments: Any, protection: Mapping[str, Any] | None = None, **keywords: Any):
        super().__init__(*arguments, **keywords)
        trainer: Any = self
        processes = max(trainer.args.world_size, trainer.args.n_gpu)
        first = "call moc.transformers.init() before TrainingArguments"
        self._job = joined_job("the Trainer", first, processes, protection)
        self._protection, self._run, self._groups = dict(protection or {}), None, None
        self._group: list | None = None  # the one that is computed now
        states: list[Any] = [PartialState(), trainer.accelerator.state]
        for state in states:
            state.process_index = state.local_process_index = self._job.rank
        trainer.add_callback(_Epochs(self))
        if isinstance(trainer.train_dataset, IterableDataset) or not hasattr(trainer.train_dataset, "__len__"):
            raise PositionError(
                "a train_dataset without length has no position, so a replacement could not read the same samples. "
                "Fix: give a map-style data set",
                code="data-without-position",
            )
        if self._job.rank:
            trainer.args.save_strategy, trainer.args.logging_strategy = SaveStrategy.NO, IntervalStrategy.NO
            for callback in (ProgressCallback, PrinterCallback):
                trainer.remove_callback(callback)

    def get_train_dataloader(self) -> Any:
        """Returns the batches of this worker; ``max_steps`` then has the number of iterations."""
        trainer: Any = self
        inner, args = super().get_train_dataloader(), trainer.args  # pyright: ignore[reportAttributeAccessIssue]
        seed = args.data_seed or args.seed
        self._loader = shared_loader(inner, seed, self._job, args.gradient_accumulation_steps)
        self.in_epoch = len(self._loader) // args.gradient_accumulation_steps
        if args.max_steps <= 0:
            args.max_steps = math.ceil(self.in_epoch * args.num_train_epochs)
        return _TrainerBatches(self, inner.dataset)

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """Trains like the Trainer; ``resume_from_checkpoint`` is not needed, because the snapshots have the state."""
        if self._run is not None:
            raise SettingsError(
                "the Trainer has trained already, and a run protects one training. Fix: create another Trainer, with "
                "more iterations",
                code="loop-call-unsupported",
            )
        return super().train(*arguments, **keywords)  # pyright: ignore[reportAttributeAccessIssue]

    def next_group(self) -> list | None:
        """Returns the batches of the next iteration; None at the end.  The first call begins the run."""
        trainer: Any = self
        if self._groups is None:
            self._begin()
            self._group = next(self._groups, None)  # pyright: ignore[reportArgumentType]  # set by _begin()
            trainer.state.global_step = self._run.iteration  # pyright: ignore[reportOptionalMemberAccess]  # as above
            return self._group
        self._group = next(self._groups, None)
        return self._group

    def _begin(self) -> None:
        trainer: Any = self
        args = trainer.args
        # the schedule watches accelerate's optimizer, and not the one that it wraps
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        limit, args.max_grad_norm = args.max_grad_norm, 0.0  # clipped after the gradients are averaged
        optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
        settings: dict[str, Any] = {"directory": os.path.join(args.output_dir, "snapshots")} | self._protection
        self._run = protect(
            trainer.model,
            getattr(optimizer, "optimizer", optimizer),
            data=self._loader,
            iterations=args.max_steps,
            scheduler=getattr(scheduler, "scheduler", scheduler),
            scaler=trainer.accelerator.scaler,
            accumulate=args.gradient_accumulation_steps,
            grouped=True,
            clip_grad_norm=limit or None,
            seed=args.seed,
            **settings,
        )
        self._groups = iter(self._run)
        trainer.optimizer, trainer.lr_scheduler = (
            Stepping(optimizer, self.commit),
            Stepping(scheduler, do_nothing),
        )

    def commit(self) -> None:
        """Ends an iteration, and repeats iterations that a lost worker has undone."""
        run, groups = self._run, self._groups
        assert run is not None and groups is not None  # in training
        target, self._group = run.iteration + 1, None
        has_committed = run.step()
        while not has_committed or run.iteration < target:
            has_committed = self._compute(next(groups))

    def end(self) -> None:
        """Ends the training on all workers; after one more iteration if this one ends early."""
        run, groups = self._run, self._groups
        assert run is not None and groups is not None  # in training
        trainer: Any = self
        target = run.iteration
        trainer.model.zero_grad()  # of an iteration that is not complete
        while (group := self._group or next(groups, None)) is not None:
            self._group = None
            self._compute(group, stop=run.iteration + 1 >= target)

    def _compute(self, group: list, stop: bool = False) -> bool:
        trainer: Any = self
        assert self._run is not None  # in training
        batches, items = trainer.get_batch_samples(iter(group), len(group), trainer.args.device)
        for batch in batches:
            trainer.training_step(trainer.model_wrapped, batch, items)
        return self._run.step(stop=stop)


class FaultTolerantTrainer(FaultTolerance, transformers.Trainer):
    """A ``transformers.Trainer`` that survives the loss of workers."""


class _TrainerBatches:
    """Batches without a length, so that the Trainer counts iterations and not epochs."""

    def __init__(self, owner: FaultTolerance, dataset: Dataset):
        self._owner, self.dataset = owner, dataset

    def __iter__(self) -> Iterator[Any]:
        while (group := self._owner.next_group()) is not None:
            yield from group
        trainer: Any = self._owner
        trainer.control.should_training_stop = True  # another worker may have ended the training early


class _Epochs(TrainerCallback):
    """Counts epochs, and ends the run with the training, before the Trainer loads its best model."""

    def __init__(self, owner: FaultTolerance):
        self._owner = owner

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        state.epoch = state.global_step / self._owner.in_epoch
        if state.global_step % self._owner.in_epoch == 0 and state.global_step < state.max_steps:
            trainer: Any = self._owner
            trainer.callback_handler.on_epoch_end(args, state, control)
            trainer.callback_handler.on_epoch_begin(args, state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if control.should_training_stop:
            self._owner.end()
