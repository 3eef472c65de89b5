"""Fault tolerance for the Trainer of Lightning (docs/how-to/own-loop.md).

    strategy = moc.lightning.FaultTolerantStrategy(protection={"policy": "full", "directory": "snapshots"})
    trainer = lightning.Trainer(strategy=strategy, devices=1, max_epochs=3)
    trainer.fit(module, loader)

The Trainer works as in one process: the strategy shares the batches of the training, averages the gradients after the
last ``backward()`` of an iteration, and commits each update.  After the loss of a worker, the strategy repeats the
iterations that were lost before it returns from the update, so that the Trainer's counters never go back.  In a
replacement, the Trainer continues in the epoch and batch of the resumed iteration.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from moc.private_interfaces import require
from moc.session.settings import SettingsError
from moc.torch.frameworks import Stepping, do_nothing, join_alone, joined_job, shared_loader
from moc.torch.loop import ProtectedRun, protect


class FaultTolerantStrategy(SingleDeviceStrategy):
    """A strategy whose training survives the loss of workers.

    Only rank 0 logs and saves; loaders for validation return all batches to each worker.  ``devices=1`` and the batch
    size count for each worker.

    Args:
        device: device of this worker; None for its GPU, or the CPU without GPUs.
        protection: arguments of :func:`moc.torch.protect`, such as policy, tier and directory.
        keywords: arguments of ``SingleDeviceStrategy``.

    Attributes:
        run: the protected run; None before the training.
    """

    strategy_name = "moc_fault_tolerant"

    def __init__(
        self,
        device: torch.device | str | None = None,
        protection: Mapping[str, Any] | None = None,
        **keywords: Any,
    ):
        require("lightning")
        job = join_alone()
        if device is None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        super().__init__(device, **keywords)
        self._job = joined_job("Lightning", "create FaultTolerantStrategy first", 1, protection)
        self.global_rank = rank_zero_only.rank = job.rank
        self._protection = dict(protection or {})
        self._loss: Tensor | float = 0.0
        self.run: ProtectedRun | None = None
        self._groups: Iterator[list] | None = None
        self._group: list | None = None  # the one that is computed now

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker logs and saves."""
        return self._job.rank == 0

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None  # the Trainer has connected it
        return self.lightning_module.trainer

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns this worker's batches of the training, and resumes; other loaders stay as they are.

        Raises:
            SettingsError: the Trainer has an option that cannot be repeated.
            PositionError: the data have no position.
        """
        trainer = self._trainer
        if not trainer.training:
            return super().process_dataloader(dataloader)
        schedules = [config.scheduler for config in self.lr_scheduler_configs]
        self._refuse(trainer)
        accumulate = trainer.accumulate_grad_batches
        loader = shared_loader(dataloader, self._protection.get("seed") or 0, self._job, accumulate)
        in_epoch = len(loader) // accumulate
        limits = [trainer.max_steps, -1 if trainer.max_epochs is None else trainer.max_epochs * in_epoch]
        if (iterations := min((limit for limit in limits if limit >= 0), default=None)) is None:
            raise _unsupported("an unlimited training", "give max_steps or max_epochs")
        self.run = protect(
            trainer.lightning_module,
            self.optimizers[0],
            data=loader,
            iterations=iterations,
            scheduler=schedules[0] if schedules else None,
            accumulate=accumulate,
            grouped=True,
            **self._protection,
        )
        for config in self.lr_scheduler_configs:
            stepping: Any = Stepping(config.scheduler, do_nothing)
            config.scheduler = stepping
        _resume_counters(trainer.fit_loop, self.run.resume(), in_epoch, accumulate)
        if self.run.iteration >= iterations:  # the Trainer calls no hook then
            self.run.finish()
        self._groups = iter(self.run)
        return _EpochBatches(self, trainer, len(loader), accumulate)

    def _refuse(self, trainer: Any) -> None:
        """Refuses what the repetition of an iteration would not repeat.

        Raises:
            SettingsError: the Trainer has such an option.
        """
        configs = self.lr_scheduler_configs
        is_stepped = all(c.interval == "step" and c.frequency == 1 and not c.reduce_on_plateau for c in configs)
        if not trainer.lightning_module.automatic_optimization or len(self.optimizers) != 1:
            raise _unsupported("manual optimization", "use one optimizer and automatic optimization")
        if len(configs) > 1 or not is_stepped:
            raise _unsupported("this schedule", "return one schedule with interval 'step' and frequency 1")
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise _unsupported("precision 16-mixed", "use precision bf16-mixed")
        limit = trainer.limit_train_batches  # 1 is one batch, and 1.0 all of them
        if isinstance(limit, int) or limit != 1.0 or trainer.reload_dataloaders_every_n_epochs:
            raise _unsupported("a limit or a reload of the training data", "remove the option")
        if self.run is not None:
            raise _unsupported("several training loaders or trainings", "use one loader and one call of fit()")

    def next_group(self) -> list | None:
        """Returns the batches of the next iteration; None at the end."""
        assert self._groups is not None  # in training
        self._group = next(self._groups, None)
        return self._group

    def post_backward(self, closure_loss: Tensor) -> None:
        """Adds the loss, which Lightning has divided by the batches of an iteration."""
        super().post_backward(closure_loss)
        self._loss = self._loss + closure_loss.detach() * self._trainer.accumulate_grad_batches

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **keywords: Any) -> Any:
        """Ends an iteration, and repeats iterations that a lost worker has undone."""
        run = self.run
        assert run is not None  # in training
        target, output = run.iteration + 1, None

        def reduced() -> Any:  # before the Trainer clips gradients
            nonlocal output
            output = closure()
            run.reduce()
            return output

        stepping: Any = Stepping(optimizer, self._step)
        has_committed = super().optimizer_step(stepping, reduced, model, **keywords)
        while not has_committed or run.iteration < target:
            has_committed = self._repeat(next(self._groups or iter(())))
        return output

    def _step(self, closure: Callable[[], Any], stop: bool = False) -> bool:
        closure()
        loss, self._loss, self._group = self._loss, 0.0, None
        assert self.run is not None  # in training
        return self.run.step(loss, stop)

    def _repeat(self, group: list, stop: bool = False) -> bool:
        """Computes an iteration again, with the hooks of the module."""
        loop, module = self._trainer.fit_loop.epoch_loop, self._trainer.lightning_module
        assert self.run is not None  # in training
        self._loss = 0.0
        for number, batch in enumerate(group):
            batch = self.batch_to_device(self.precision_plugin.convert_input(batch), dataloader_idx=0)
            parameters = loop._build_kwargs(OrderedDict(), batch, number)
            loop.automatic_optimization._make_closure(parameters, self.optimizers[0], number)()
        stepping: Any = Stepping(self.optimizers[0], partial(self._step, stop=stop))
        return self.precision_plugin.optimizer_step(stepping, model=module, closure=self.run.reduce)  # clips

    def on_train_end(self) -> None:
        """Repeats iterations that were lost at the end, and leaves the job; after one more iteration if early."""
        super().on_train_end()
        if self.run is not None:
            target = self.run.iteration
            while (group := self._group or self.next_group()) is not None:
                self._repeat(group, stop=self.run.iteration + 1 >= target)


class _EpochBatches:
    """Batches of this worker: an iterator returns the batches of the Trainer's epoch that are not completed."""

    def __init__(self, strategy: FaultTolerantStrategy, trainer: Any, batches: int, accumulate: int):
        self._strategy, self._trainer, self._length, self._accumulate = strategy, trainer, batches, accumulate

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        run = self._strategy.run
        end = (self._trainer.current_epoch + 1) * (self._length // self._accumulate)
        while run is not None and run.iteration < end:
            if (group := self._strategy.next_group()) is None:
                self._trainer.should_stop = True  # another worker has ended the training early
                return
            yield from group


def _resume_counters(fit_loop: Any, iteration: int, in_epoch: int, accumulate: int) -> None:
    """Sets the counters of the Trainer to a number of completed iterations."""
    epochs, completed = divmod(iteration, in_epoch)
    progress, loop = fit_loop.epoch_progress, fit_loop.epoch_loop
    for counters in (progress.current, progress.total):
        counters.processed = counters.completed = epochs
        counters.ready = counters.started = epochs + (completed > 0)
    steps = loop.automatic_optimization.optim_progress.optimizer.step
    steps.total.ready = steps.total.completed = iteration
    if completed:
        steps.current.ready = steps.current.completed = completed
        for counters, number in ((loop.batch_progress.current, completed), (loop.batch_progress.total, iteration)):
            counters.ready = counters.started = counters.processed = counters.completed = number * accumulate
        fit_loop.restarting = True


def _unsupported(option: str, remedy: str) -> SettingsError:
    return SettingsError(
        f"Lightning's Trainer has {option}, which a repeated iteration could not repeat. Fix: {remedy}",
        code="loop-call-unsupported",
    )
