"""Protects a user's PyTorch loop: it recovers from lost workers, replays, and commits each iteration.

    run = protect(model, optimizer, data=loader, iterations=1000, directory="snapshots")
    for batch in run:                            # recovers, if a worker was lost
        loss_of(run.model(batch)).backward()     # a lost worker raises nothing here: failures are deferred
        run.step()                               # averages gradients, agrees with all workers, updates

A failure of another worker interrupts a collective in the body, where the iterator cannot catch an exception.  So
failures are deferred (:class:`moc.runtime.process_group.FailureDeferral`): the body ends in good order over zeros,
``step()`` updates nothing, and the iterator recovers and returns the batch again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moc.cli_output import print_lines
from moc.events import EventLog, event_directory
from moc.runtime.collectives import sum_over_workers
from moc.runtime.job import Interruption, Job, World
from moc.runtime.loss_record import generation_event
from moc.runtime.managed_job import join_job
from moc.runtime.process_group import DEFERRAL
from moc.runtime.progress import progress
from moc.session.resume.point import NoRecoveryPoint
from moc.session.resume.survivors import LocalRemains
from moc.session.session import Session
from moc.session.settings import Settings, SettingsError
from moc.state.record import Position, StepRecord
from moc.store.ownership import release
from moc.torch.data import Batches, Stateful
from moc.torch.engine import Loop, LoopEngine, check_policy
from moc.torch.naming import structure_of

_TIMEOUT = timedelta(minutes=10)

_job: tuple[Job, torch.device, str] | None = None
_running: tuple[Job, ProtectedRun] | None = None


def init(device: torch.device | str | None = None, backend: str | None = None, timeout: timedelta = _TIMEOUT) -> Job:
    """Initializes torch.distributed, in place of ``init_process_group``; only needed before ``fully_shard`` and meshes.

    Args:
        device: device of this worker; None for its GPU, or the CPU without GPUs.
        backend: ``gloo`` or ``nccl``; None for the backend of the device.
        timeout: timeout of a collective.

    Returns:
        The job, with ``rank`` and ``size``.

    Raises:
        SettingsError: torch.distributed is initialized already.
    """
    global _job
    if _job is not None:
        return _job[0]
    if dist.is_initialized():
        raise SettingsError(
            "torch.distributed is initialized already, so its groups would not survive a lost worker. Fix: remove "
            "init_process_group(), or call moc.torch.init() in its place",
            code="loop-wrapped-too-early",
        )
    job = join_job()
    if device is None:
        gpu = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        device = gpu if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    job.connect(backend, timeout, device)
    _job = job, device, backend
    return job


def protect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    data: Any = None,
    iterations: int | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    state: Mapping[str, Stateful] | None = None,
    wrap: Callable[[nn.Module], Any] | None = None,
    accumulate: int = 1,
    grouped: bool = False,
    clip_grad_norm: float | None = None,
    directory: str = "snapshots",
    policy: str | None = "full",
    tier: str = "memory",
    snapshot_interval: int | str = 1,
    options: Mapping[str, Any] | None = None,
    operators: Mapping[str, str] | None = None,
    top_k: int | None = None,
    forward: Callable[[nn.Module, Any], Tensor] | None = None,
    seed: int | None = 0,
    data_rank: int | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    log_dir: str | None = None,
    **settings: Any,
) -> ProtectedRun:
    """Protects a loop; docs/how-to/own-loop.md explains it.

    Args:
        model: module, not wrapped in DistributedDataParallel.
        optimizer: an optimizer of ``torch.optim`` (docs/how-to/own-loop.md), of all parameters that are updated.
        data: DataLoader of a map-style data set, Sampler, list of batches, loader with ``state_dict``, or function that
            returns the batches from a position on (:mod:`moc.torch.data`); None for the positions themselves.
        iterations: updates of the training; None for one epoch of the data.
        scheduler: learning-rate schedule without a metric; :meth:`ProtectedRun.step` steps it.
        scaler: ``torch.amp.GradScaler``; :meth:`ProtectedRun.step` steps and updates it.
        state: by name, other objects with ``state_dict`` and ``load_state_dict``, such as an EMA of the weights.
        wrap: wraps the model after each recovery, such as ``DistributedDataParallel`` or ``torch.compile``.
        accumulate: batches of an iteration, whose gradients are added.
        grouped: the iterator returns the list of the batches of an iteration, with one :meth:`ProtectedRun.step`.
        clip_grad_norm: largest norm of the gradients.
        directory: directory or URL of the snapshots.
        policy: policy of snapshots; None for none.
        tier: where a snapshot is durable: ``disk``, ``memory`` or ``peers``.
        snapshot_interval: iterations between snapshots, or ``auto``.
        options: options of the policy, such as ``{"k": 2}`` for ``pec``.
        operators: operators by parameter names (:func:`moc.torch.naming.structure_of`).
        top_k: experts of a token, if the model has no such attribute.
        forward: function of model and batch that returns the loss whose gradients the body computes, without the scale
            of ``scaler``; policies that replay iterations need it.
        seed: seed of random numbers and of the order of samples, which follow from it and the position; None to seed
            only the data.
        data_rank: index of this worker among those that read different batches; None for its rank.  The workers of a
            tensor-parallel group have the same one.
        device: as in :func:`init`.
        backend: as in :func:`init`.
        log_dir: directory of ``events.jsonl``.
        settings: more fields of :class:`moc.Settings`, such as ``persist_interval=100``.

    Raises:
        SettingsError: an argument is invalid, or the model is wrapped already.
        PositionError: the data have no position.
        UnsupportedStateError: the state cannot be saved.
    """
    _check_call(model, optimizer, scheduler)
    job = init(device, backend)
    assert _job is not None  # set by init()
    world = World.replicas(job, _job[1], _job[2])
    if data_rank is not None:
        world = dataclasses.replace(world, data_rank=data_rank)
    batches = Batches(data, seed or 0, world.data_rank)
    structure = structure_of(model, operators)
    loop = Loop(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        objects=state or {},
        accumulate=accumulate,
        grouped=grouped,
        clip_grad_norm=clip_grad_norm,
        seed=seed,
        top_k=top_k,
        forward=forward,
    )
    if iterations is None:
        iterations = batches.epoch // accumulate
    chosen = Settings(
        directory, iterations, policy, snapshot_interval=snapshot_interval, options=options or {}, tier=tier, **settings
    )
    engine = LoopEngine(world, loop, structure, batches)
    loop = dataclasses.replace(loop, replays=check_policy(chosen, engine, wrap is not None))
    return ProtectedRun(world, loop, engine, chosen, wrap, log_dir)


def _check_call(model: Any, optimizer: Any, scheduler: Any) -> None:
    if isinstance(model, DistributedDataParallel):
        raise SettingsError(
            "the model is wrapped in DistributedDataParallel already, whose broadcast would replace the weights of "
            "surviving workers. Fix: give the module itself, and wrap=DistributedDataParallel",
            code="loop-wrapped-too-early",
        )
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise SettingsError(
            f"protect() takes one model and one optimizer, not {type(model).__name__} and {type(optimizer).__name__}. "
            "Fix: give an nn.ModuleDict of the models, and one optimizer with their parameters, and let each iteration "
            "compute gradients of one of them",
            code="loop-call-unsupported",
        )
    if scheduler is not None:
        try:
            inspect.signature(scheduler.step).bind()
        except TypeError:
            raise SettingsError(
                f"{type(scheduler).__name__} needs a metric in each step. Fix: choose another schedule; in a loop of "
                "moc.torch, give it as state={'schedule': ...}, and step it by run.loss after `if run.step():`",
                code="loop-call-unsupported",
            ) from None


class ProtectedRun:
    """A protected loop: an iterator of batches.

    Attributes:
        model: the model to call, wrapped if ``wrap`` was given; changes after a recovery.
        iteration: number of completed iterations.
        loss: mean over workers of the last loss given to :meth:`step`; None before.
    """

    def __init__(
        self,
        world: World,
        loop: Loop,
        engine: LoopEngine,
        settings: Settings,
        wrap: Callable[[nn.Module], Any] | None,
        log_dir: str | None,
    ):
        self._world, self._job, self._loop, self._engine = world, world.job, loop, engine
        self._settings, self._wrap = settings, wrap
        self._log = _Log(world.rank, log_dir)
        self._remains, self._session = LocalRemains(), None
        self._interruption: Interruption | None = None
        self._position = Position()
        self._pending: tuple[StepRecord, float] | None = None
        self._number, self._started_at, self._reported_at = 0, 0.0, 0.0
        self._losses: Tensor | float = 0.0
        self._is_finite: bool | None = None  # of the averaged gradients; None before they are averaged
        self._stop_requested = self._is_over = self._owes_step = self._is_finishing = False
        self.model: Any = loop.model
        self.loss: float | None = None

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self._world.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._world.size

    @property
    def iterations(self) -> int:
        """Number of iterations of the training."""
        return self._settings.train_iters

    @property
    def is_last_batch(self) -> bool:
        """Whether the next :meth:`step` updates the model, and does not only accumulate gradients."""
        return self._loop.grouped or self._number == self._loop.accumulate - 1

    @property
    def iteration(self) -> int:
        """Number of completed iterations; in the body after ``step()``, with the current one."""
        return self._position.iteration if self._pending is None else self._pending[0].iteration

    def __iter__(self) -> Iterator[Any]:
        try:
            while not self._is_over and (ready := self._next()) is not None:
                with ready as batch:
                    yield batch
        except GeneratorExit:
            self._leave_early()
            raise

    def _next(self) -> contextlib.AbstractContextManager[Any] | None:
        """Commits the last iteration, recovers if a worker was lost, and returns the context of the next batch."""
        while True:
            try:
                DEFERRAL.set_active(False)
                self._commit()  # before a failure that the body has deferred: all workers have agreed on the update
                DEFERRAL.raise_deferred()
                if self._session is None:
                    self._begin()
                if self._position.iteration >= self._settings.train_iters or self._stop_requested or self._is_finishing:
                    return self._end()
                if self._owes_step:
                    raise SettingsError(
                        "a batch was requested, and step() was not called for the last one, so the positions of the "
                        "workers could differ. Fix: call step() once for each batch; scale a loss to zero to ignore "
                        "a batch",
                        code="loop-step-missing",
                    )
                if self._number == 0:
                    progress("step")
                    self._started_at = time.perf_counter()
                batch, self._owes_step = self._take(), True
                self._engine.seed(self._position.iteration, self._number)
                return self._body(batch)
            except NoRecoveryPoint:
                self._job.start_over()
            except Exception as error:
                self._recover(error)

    def resume(self) -> int:
        """Resumes before the first batch, and returns the number of completed iterations; all workers call it."""
        while self._session is None:
            try:
                self._begin()
            except NoRecoveryPoint:
                self._job.start_over()
            except Exception as error:
                self._recover(error)
        return self.iteration

    def _take(self) -> Any:
        if not self._loop.grouped:
            return self._engine.batches.take()
        return [self._engine.batches.take() for _ in range(self._loop.accumulate)]

    @contextlib.contextmanager
    def _body(self, batch: Any) -> Iterator[Any]:
        """Context of the loop's body: failures are deferred, and only the last batch synchronizes gradients."""
        with contextlib.ExitStack() as stack:
            if not self.is_last_batch and isinstance(self.model, DistributedDataParallel):
                stack.enter_context(self.model.no_sync())
            DEFERRAL.set_active(True)
            yield batch

    def _begin(self) -> None:
        """Begins a generation: resumes, and wraps the model, on all workers in the same order."""
        global _running
        if _running is not None and _running[0] is self._job and _running[1] is not self:
            raise SettingsError(
                "another run of this program has not ended, and a recovery repeats the iterations of one. Fix: protect "
                "one nn.ModuleDict of the models, with one optimizer of their parameters, or end the other run first",
                code="loop-call-unsupported",
            )
        if interruption := self._job.report_ready() or self._interruption:
            self._log.message(f"generation {interruption.generation}: {interruption.reason}")
            event = generation_event(interruption, self._log.events.newest("generation"), self._job)
            self._log.events.write("generation", **event)
        self._interruption, self._pending, self._number, self._losses = None, None, 0, 0.0
        self._is_finite, self._owes_step = None, False
        self.model = self._loop.model
        session = self._session = Session(self._engine, self._settings, self._log, self._remains)
        self._position = session.resume()
        _running = self._job, self
        self._engine.begin(self._position)
        if self._wrap is not None:
            self.model = self._wrap(self._loop.model)
            if not self._position.iteration:
                self._engine.capture()  # with buffers that wrap has loaded
            wrappers = [self.model, *self.model.modules()] if isinstance(self.model, nn.Module) else []
            reducers = [module for module in wrappers if isinstance(module, DistributedDataParallel)]
            self._engine.averages = not reducers
            if self.size > 2 and interruption is None and not all(ddp.find_unused_parameters for ddp in reducers):
                self._log.message(
                    "DistributedDataParallel changes the order of its buckets in its second iteration, so weights will "
                    "differ in rounding after a recovery. Fix: wrap with find_unused_parameters=True"
                )
        if (record := session.record) and self._log.events.newest("iteration").get("iteration") == record.iteration - 1:
            self._report(record, 0.0)  # a lost rank 0 has completed it, and not reported it
        self._log.events.write(
            "start",
            iteration=self._position.iteration,
            run=session.run,
            job=self._job.id,
            term=self._job.term,
            world_size=self.size,
            parameters=sum(parameter.numel() for parameter in self._loop.model.parameters()),
            startup_s={},
        )
        self._reported_at = time.perf_counter()

    def _report(self, record: StepRecord, elapsed_s: float) -> None:
        assert self._session is not None  # of the same generation
        self._log.events.write(
            "iteration",
            iteration=record.iteration,
            consumed_samples=self._position.consumed_samples,
            loss=record.loss,
            learning_rate=record.learning_rate,
            grad_norm=None,  # the loop need not compute it
            loss_scale=record.loss_scale,
            skipped=record.skipped,
            tokens=record.tokens,
            elapsed_s=round(elapsed_s, 6),
            **self._session.gauges,
        )

    def step(self, loss: Tensor | float | None = None, stop: bool = False) -> bool:
        """Ends a batch; after the last one of an iteration, updates the model on all workers, or on none.

        Args:
            loss: loss of the batch, for :attr:`loss`.
            stop: end the training after this iteration, on all workers.

        Returns:
            Whether the update was made, or the batch was not the last one of its iteration.  False if a worker was
            lost: the next batch is then the first one of this iteration.
        """
        if not self._owes_step:
            raise SettingsError(
                "step() was called twice for a batch, or outside of the loop. Fix: call it once for each batch",
                code="loop-call-unsupported",
            )
        self._owes_step = False
        return self._attempt(partial(self._end_batch, loss, stop))

    def reduce(self) -> bool:
        """Averages, unscales and clips the gradients before :meth:`step`, so that the body can read and change them.

        All workers call it, after ``backward()`` of the last batch of an iteration (:attr:`is_last_batch`).

        Returns:
            Whether the gradients are averaged; False if a worker was lost.

        Raises:
            SettingsError: gradients of the iteration are still missing, or the policy replays iterations, without what
                the body does to gradients.
        """
        if self._loop.replays:
            raise SettingsError(
                f"policy {self._settings.policy} replays iterations, without what the body does to gradients after "
                "reduce(). Fix: drop reduce(), and clip by clip_grad_norm of protect(), or choose full",
                code="loop-policy-unsupported",
            )
        if not (self._owes_step and self.is_last_batch):
            raise SettingsError(
                "reduce() was called before the last batch of an iteration, or after step(), so later gradients would "
                "not be averaged. Fix: call it if run.is_last_batch, between backward() and step()",
                code="loop-call-unsupported",
            )
        return self._attempt(self._average)

    def _attempt(self, action: Callable[[], None]) -> bool:
        """Executes a collective action of the body; returns False if a worker was lost."""
        try:
            DEFERRAL.set_active(False)
            DEFERRAL.raise_deferred()
            action()
            return True
        except Exception as error:  # the iterator recovers, so that all workers execute the rest of the body
            DEFERRAL.failure = error
            return False
        finally:
            DEFERRAL.set_active(True)

    def _end_batch(self, loss: Tensor | float | None, stop: bool) -> None:
        self._losses = self._losses + without_waiting(loss)
        self._number += self._loop.accumulate if self._loop.grouped else 1
        if self._number == self._loop.accumulate:
            self._update(stop)

    def _average(self) -> None:
        if self._is_finite is None:
            self._is_finite = self._engine.reduce()

    def _update(self, stop: bool) -> None:
        engine, session, loop = self._engine, self._session, self._loop
        assert session is not None  # the body runs in a generation
        self._average()
        finite, self._is_finite = bool(self._is_finite), None
        digest = engine.digest
        contribution = {"loss": self._losses / loop.accumulate, "stop": float(stop), **session.contribution()}
        contribution |= {"digest": digest, "digest_squared": digest**2}
        totals = sum_over_workers(contribution, self._world)  # from here on all workers can update
        self.loss, self._losses, self._number = totals["loss"] / self._world.size, 0.0, 0
        if self._world.size * totals.pop("digest_squared") != totals.pop("digest") ** 2:  # variance of the digests
            raise SettingsError(
                "the state of the optimizer's groups, the schedule, the scaler or an object differs among the workers, "
                "so a replacement would load the wrong one. Fix: change it by values that all workers have, such "
                "as run.loss; keep what one worker passes to its next batch in a loader with state_dict",
                code="loop-state-differs",
            )
        batches = loop.accumulate * self._world.size
        record = StepRecord(
            iteration=self._position.iteration + 1,
            loss=totals["loss"] / self._world.size,
            grad_norm=0.0 if finite else float("inf"),
            loss_scale=1.0 if loop.scaler is None else float(loop.scaler.get_scale()),
            skipped=not finite,
            tokens=0,
            learning_rate=engine.learning_rate,
            samples=batches,
            stop=bool(totals["stop"]),
        )
        session.on_totals(totals)
        engine.apply(record)
        self._pending = record, self._started_at

    def _commit(self) -> None:
        """Commits an iteration after the body, so that the user's objects have changed, too."""
        if self._pending is None:
            return
        session, (record, started_at), self._pending = self._session, self._pending, None
        assert session is not None  # of the same generation
        self._engine.capture()  # before the state is read
        self._position = session.completed(record, started_at)
        now = time.perf_counter()
        self._report(record, now - self._reported_at)
        self._reported_at = now
        self._stop_requested = record.stop
        progress("save")
        session.take()

    def _recover(self, error: Exception) -> None:
        """Waits until the job is complete again; raises the error, unless a worker was lost."""
        DEFERRAL.set_active(False)
        DEFERRAL.failure = None
        self._interruption = self._job.rejoin_after(error)
        if self._session is not None:
            self._session.interrupt()
        self._session = None

    def _end(self) -> None:
        """Ends the training in good order; a lost worker raises before the job is left."""
        session = self._session
        assert session is not None  # of the last generation
        progress("save")
        session.flush()
        session.close()
        self._log.events.write("exit", iteration=self._position.iteration, reason="done", code=0)
        self._job.leave()
        release(self._job.id)
        self._is_over = True
        global _job
        _job = None

    def finish(self) -> None:
        """Ends the training before its last iteration; all workers call it after the same iteration."""
        self._is_finishing = True
        while not self._is_over:
            self._next()

    def _leave_early(self) -> None:
        """Ends after ``break`` or an exception in the body."""
        if self._is_over:
            return
        global _running
        _running, failure, DEFERRAL.failure = None, DEFERRAL.failure, None
        DEFERRAL.set_active(False)
        if failure is not None:
            self._log.message(f"the loop's body ended after a lost connection ({failure}): this worker is replaced")
            self._job.start_over()
        if self._session is not None:
            self._session.close()


def without_waiting(loss: Tensor | float | None) -> Tensor | float:
    """Returns a loss in float64; one on a device stays there, since a read would wait for the batch."""
    if isinstance(loss, Tensor) and not isinstance(loss, DTensor):
        return loss.detach().double().reshape(())
    return 0.0 if loss is None else float(loss)


class _Log:
    """Messages and events of rank 0."""

    def __init__(self, rank: int, directory: str | None):
        self._rank, self.events = rank, EventLog(event_directory(directory) if rank == 0 else None)

    def message(self, text: str) -> None:
        if self._rank == 0:
            print_lines(text, flush=True)
