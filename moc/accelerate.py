"""Fault tolerance for loops of Hugging Face accelerate (docs/how-to/own-loop.md).

    accelerator = moc.accelerate.FaultTolerantAccelerator(protection={"iterations": 1000, "directory": "snapshots"})
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(epochs):
        for batch in loader:                  # recovers, if a worker was lost
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()              # averages gradients, agrees with all workers, updates
                scheduler.step()
                optimizer.zero_grad()

A replacement executes the loop from its beginning: its loader has no batches in epochs that are completed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from moc.session.settings import SettingsError
from moc.torch.frameworks import Stepping, do_nothing, join_alone, joined_job, shared_loader
from moc.torch.loop import ProtectedRun, protect


class FaultTolerantAccelerator(Accelerator):
    """An ``Accelerator`` whose loop survives the loss of workers.

    It works as in one process, except that only rank 0 is the main process: ``gather`` returns its argument, the
    schedule is stepped once for each update, and loaders for evaluation return all batches to each worker.  The first
    loader that is prepared is the loader of the training; its batches are shared by the workers.

    Args:
        arguments: arguments of ``Accelerator``.
        protection: arguments of :func:`moc.torch.protect`, such as iterations, policy, tier and directory.
        keywords: arguments of ``Accelerator``.

    Attributes:
        run: the protected run; None before the first batch is read.

    Raises:
        SettingsError: the accelerator would wrap the model, such as by DeepSpeed or FSDP.
    """

    def __init__(self, *arguments: Any, protection: Mapping[str, Any] | None = None, **keywords: Any):
        job = join_alone()
        super().__init__(*arguments, **keywords)
        first = "create FaultTolerantAccelerator first"
        self._job = joined_job("accelerate", first, self.num_processes, protection)
        states: list[Any] = [PartialState(), self.state]
        for state in states:
            state.process_index = state.local_process_index = job.rank
        self._protection, self._objects = dict(protection or {}), []
        self._parts: dict[str, Any] = {}
        self._loss: Tensor | None = None
        self.run: ProtectedRun | None = None

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Saves the state of objects with the model; called before the first batch is read."""
        super().register_for_checkpointing(*objects)
        self._objects += objects

    def prepare(self, *objects: Any, **keywords: Any) -> Any:
        """Prepares model, optimizer, loader and schedule of the training, and other loaders.

        Raises:
            SettingsError: there are several models, optimizers or schedules.
            PositionError: the data of the training have no position.
        """
        prepared = [self._prepare_part(part, **keywords) for part in objects]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare_part(self, part: Any, **keywords: Any) -> Any:
        kinds: dict[str, Any] = {
            "model": nn.Module,
            "optimizer": torch.optim.Optimizer,
            "scheduler": LRScheduler,
            "data": DataLoader | Iterable,
        }
        kind = next((kind for kind, accepted_types in kinds.items() if isinstance(part, accepted_types)), None)
        if kind is None or (kind == "data" and "data" in self._parts):
            return super().prepare(part, **keywords)
        if kind in self._parts:
            raise SettingsError(
                f"accelerator.prepare() has several objects of the kind {kind}, and a run protects one. Fix: protect "
                "the loop by moc.torch, with one optimizer of all parameters",
                code="loop-call-unsupported",
            )
        if kind == "data":
            part = self._parts[kind] = shared_loader(part, self._seed, self._job, self.gradient_accumulation_steps)
            return _EpochBatches(self, len(part))
        self._parts[kind] = part
        if kind == "model":
            self._parts[kind] = part = super().prepare(part, **keywords)
            return part
        if kind == "scheduler":
            return Stepping(part, do_nothing)

        def zero_grad(set_to_none: bool = True) -> None:  # as accelerate's optimizers do
            if self.sync_gradients:
                part.zero_grad(set_to_none)

        return Stepping(part, self.commit, zero_grad=zero_grad)

    @property
    def iteration(self) -> int:
        """Number of completed iterations."""
        return 0 if self.run is None else self.run.iteration

    @property
    def _seed(self) -> int:
        return self._protection.get("seed") or 0

    def begin(self) -> ProtectedRun:
        """Returns the run; the first call resumes it."""
        if self.run is None:
            if missing := {"model", "optimizer", "data"} - self._parts.keys():
                raise SettingsError(
                    f"accelerator.prepare() has not prepared {min(missing)}. Fix: prepare model, optimizer and loader "
                    "before the first batch is read",
                    code="loop-call-unsupported",
                )
            if self._protection.get("iterations") is None:
                raise SettingsError(
                    "protection has no iterations, and the loader has no number of epochs. Fix: give "
                    "protection={'iterations': ...}, the number of updates of the training",
                    code="loop-call-unsupported",
                )
            objects = {str(number): registered for number, registered in enumerate(self._objects)}
            self.run = protect(
                **self._parts,
                scaler=self.scaler,
                state=objects,
                accumulate=self.gradient_accumulation_steps,
                **self._protection,
            )
            self.run.resume()
        return self.run

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Context of a batch, without effect: the loader sets ``sync_gradients`` for the last batch of an iteration."""
        yield

    def backward(self, loss: Tensor, **keywords: Any) -> None:
        """Computes gradients, divided by the batches of an iteration."""
        self._loss = loss.detach()
        super().backward(loss, **keywords)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clips the averaged gradients; returns their norm before."""
        self._reduce()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clips the values of the averaged gradients."""
        self._reduce()
        nn.utils.clip_grad_value_(parameters, clip_value)

    def end_training(self) -> None:
        """Ends the training; only needed by a loop that ends before the number of iterations."""
        if self.run is not None:
            self.run.finish()
        super().end_training()

    def _reduce(self) -> None:
        if self.run is not None and self.run.is_last_batch:
            self.run.reduce()

    def commit(self, closure: Any = None) -> None:
        """Ends a batch; in place of ``optimizer.step()``."""
        if self.run is None or closure is not None:
            raise SettingsError(
                "optimizer.step() was called outside of the loop, or with a closure. Fix: call it once for each batch "
                "of the prepared loader",
                code="loop-call-unsupported",
            )
        self.run.step(self._loss)


class _EpochBatches:
    """Batches of this worker: the n-th iterator returns the batches of the n-th epoch that are not completed."""

    def __init__(self, accelerator: FaultTolerantAccelerator, batches: int):
        self._accelerator, self._length, self._epochs = accelerator, batches, 0
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        run = self._accelerator.begin()
        self._batches = self._batches or iter(run)
        self._epochs += 1
        end = self._epochs * (self._length // self._accelerator.gradient_accumulation_steps)
        while run.iteration < end or run.iteration == run.iterations:
            batch = next(self._batches, None)
            if batch is None:
                return
            self._accelerator.sync_gradients = run.is_last_batch
            yield send_to_device(batch, self._accelerator.device)
