"""Defines a training program, the parts of a worker that it builds, the run of a generation, and its callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.pretraining.checkpoint.background import Saves
from megatron.pretraining.config import Config
from megatron.pretraining.data.identity import DataIdentity
from megatron.pretraining.data.streams import Batch, BatchStream
from megatron.pretraining.duties import Duties
from megatron.pretraining.elastic.replicas import Replicas
from megatron.pretraining.engine.megatron import MegatronEngine, Model
from megatron.pretraining.engine.module_state import ModuleState
from megatron.pretraining.engine.optimizer import CommitOptimizer
from megatron.pretraining.engine.routing import AuxiliaryLosses
from megatron.pretraining.engine.schedule import MicroBatchHooks, Schedule, drop_unfinished_iteration
from megatron.pretraining.engine.step import Stepper
from megatron.pretraining.engine.upstream import LogMemory
from megatron.pretraining.logging.records import EventRecorder
from megatron.pretraining.logging.startup import DataSizes
from megatron.pretraining.process.initialize import world_of
from megatron.pretraining.process.phases import Phases
from megatron.pretraining.process.stopping import StopRequests
from megatron.pretraining.process.topology import Topology
from moc.runtime.job import Interruption, Job, World
from moc.runtime.loss_record import generation_event
from moc.session.auto import AutoPolicy
from moc.session.engine import CommitParticipant
from moc.session.resume.survivors import LocalRemains
from moc.session.session import Session
from moc.state.record import Position


class Program(Protocol):
    """Interface that :func:`megatron.pretraining.loop.pretrain` requires of a training program.

    A worker calls ``connect`` and ``build`` once, and the other methods in each generation.
    """

    def connect(self, config: Config, job: Job) -> World:
        """Joins the job and builds all process groups.

        Raises:
            ConfigError: the flags do not fit the number of workers or the backend.
        """
        ...

    def build(self, config: Config, world: World, stop: StopRequests, phases: Phases) -> WorkerParts:
        """Builds model, optimizer, data and logs; a replacement for a lost worker builds without the others."""
        ...

    def topology(self, config: Config, world: World) -> Topology:
        """Returns this worker's share of the global batch."""
        ...

    def schedule(self, parts: WorkerParts, topology: Topology) -> Schedule:
        """Returns the forward and backward passes of an iteration."""
        ...

    def auxiliary(self, parts: WorkerParts, topology: Topology) -> AuxiliaryLosses:
        """Returns the collector of further losses."""
        ...

    def model(self, parts: WorkerParts) -> Model:
        """Returns the operators of the built model; a collective call."""
        ...

    def checkpoints(self, parts: WorkerParts, model: Model) -> Saves:
        """Returns the checkpoints of ``--save`` and ``--load``."""
        ...

    def evaluate(self, run: TrainingRun, split: str, stop: StopRequests, final: bool = False) -> bool:
        """Reports the loss of a split; returns False if a stop was requested meanwhile.

        Args:
            run: the run, after an iteration.
            split: ``valid`` or ``test``.
            stop: requests to stop.
            final: training has ended.
        """
        ...

    def callbacks(self, world: World) -> Sequence[Callback]:
        """Returns the program's callbacks in a generation."""
        ...

    def forget_iteration(self, parts: WorkerParts) -> None:
        """Clears state of an interrupted iteration or evaluation outside of :class:`WorkerParts`."""
        ...


class Callback(CommitParticipant):
    """Extension of the training loop.  By default, each hook does nothing.

    All workers have the same callbacks, and call each hook of all of them in the same order, so hooks except
    :meth:`close` may contain collectives.  :meth:`contribution` and :meth:`on_totals` add values to the commit
    all-reduce, and receive their sums.
    """

    def before_training(self, run: TrainingRun) -> None:
        """Runs before the first iteration of a generation."""

    def before_iteration(self, run: TrainingRun) -> None:
        """Runs before each iteration."""

    def after_iteration(self, run: TrainingRun) -> None:
        """Runs after each committed iteration, before an evaluation or a save."""

    def between_iterations(self, run: TrainingRun) -> None:
        """Runs between two iterations, after an evaluation or a save; may end the generation by an exception."""

    def before_last_snapshot(self, run: TrainingRun) -> None:
        """Runs before the final state is written to storage."""

    def close(self) -> None:
        """Runs when the generation ends by a loss of workers or a change of nodes."""


class MembersChange(Exception):
    """Exit from the generation, on all workers after the same iteration, since nodes join or depart.

    Attributes:
        has_handed_over: the others have the state of this worker, whose node departs.
    """

    def __init__(self, has_handed_over: bool):
        super().__init__()
        self.has_handed_over = has_handed_over


class MovingState(Protocol):
    """State that moves between workers when the number of nodes changes."""

    replicas: Replicas

    def settle(self, parts: WorkerParts) -> None:
        """Agrees on the location of the state before the workers resume; a collective call.

        Raises:
            NoRecoveryPoint: no worker has trained, and this worker was built with other experts than it is assigned.
        """
        ...

    def callbacks(self, parts: WorkerParts, engine: MegatronEngine, session: Session) -> Sequence[Callback]:
        """Moves state to its new owners after the workers resumed, and returns the generation's callbacks."""
        ...

    def micro_batch_hooks(self, seed: int, topology: Topology) -> MicroBatchHooks:
        """Returns the hooks of a worker's micro batches."""
        ...


@dataclass
class WorkerParts:
    """Parts of a worker that are built once and survive the loss of other workers.

    Attributes:
        world: this worker's rank and groups in the current generation.
        streams: readers of ``train``, ``valid`` and ``test``; None on stages that read no data.
        train_iters: iterations of the complete run.
        vocabulary_rows: rows of the embedding.
        data: identity of the data that this worker reads, or once the generation has started, any worker.
        data_sizes: sizes of the training data, if this worker reads files.
        session: session of the current generation, once it has started.
        checkpoints: dense checkpoints of ``--save``, once the generation has started.
        saved: iteration of the newest complete dense checkpoint that this worker knows of; 0 without one.
        remains: state that this worker keeps when another worker is lost.
        log_memory: memory of its upstream logs, also kept.
        moving: state that moves between workers; None if the number of nodes is fixed.
        callbacks: callbacks of the current generation.
        initial_iteration: iterations completed before this worker began to train; None until then.
    """

    config: Config
    world: World
    chunks: list[DistributedDataParallel]
    modules: ModuleState
    optimizer: CommitOptimizer
    scheduler: OptimizerParamScheduler
    program: Program
    streams: dict[str, BatchStream | None]
    train_iters: int
    vocabulary_rows: int
    log: EventRecorder
    auto: AutoPolicy | None
    data: DataIdentity | None = None
    data_sizes: DataSizes | None = None
    session: Session | None = None
    checkpoints: Saves | None = None
    saved: int = 0
    remains: LocalRemains = field(default_factory=LocalRemains)
    log_memory: LogMemory = field(default_factory=LogMemory)
    moving: MovingState | None = None
    callbacks: tuple[Callback, ...] = ()
    initial_iteration: int | None = None

    def adopt_generation(self, interruption: Interruption | None) -> None:
        """Takes over the rank and groups of the generation after all workers reconnected; logs it after a loss."""
        self.world = world_of(self.world.job)
        self.log.move(self.world)
        if interruption is not None:
            event = generation_event(interruption, self.log.events.newest("generation"), self.world.job)
            self.log.events.write("generation", **event)
            reasons = [*(earlier["reason"] for earlier in event.get("earlier", ())), interruption.reason]
            self.log.message(
                f"generation {interruption.generation}: {'; '.join(reasons)}; all met again after "
                f"{interruption.reconnection_s:.2f} s"
            )

    def reset_after(self, interruption: Interruption | None) -> None:
        """Closes the interrupted session and resets everything except the state to between iterations."""
        self.adopt_generation(interruption)
        if self.checkpoints is not None:
            self.saved = max(self.saved, self.checkpoints.last_committed)
            self.checkpoints.close()
        if self.session is not None:
            self.session.interrupt()
        for callback in self.callbacks:
            callback.close()
        self.session, self.checkpoints, self.callbacks = None, None, ()
        drop_unfinished_iteration(self.chunks, self.modules)
        self.program.forget_iteration(self)


@dataclass
class TrainingRun:
    """A worker's parts with the session that tracks its progress.

    Attributes:
        callbacks: extensions of the loop, in the order of their calls.
        streams: as in :class:`WorkerParts`.
        splits: the splits with data, identical on all workers.
        train_iters: iterations of the complete run.
        stop_requested: a worker received a stop request during set-up, and there is state to save.
        missed: duties of the last completed iteration that are not done.
    """

    config: Config
    world: World
    program: Program
    stepper: Stepper
    checkpoints: Saves
    session: Session
    callbacks: tuple[Callback, ...]
    log: EventRecorder
    streams: dict[str, BatchStream | None]
    splits: set[str]
    train_iters: int
    stop_requested: bool = False
    missed: Duties = Duties()

    @property
    def position(self) -> Position:
        """Iterations and samples completed."""
        return self.session.position

    def batches(self, split: str, first_sample: int) -> Iterator[Batch] | None:
        """Returns this worker's micro batches of a split from a sample on; None on stages that read no data."""
        stream = self.streams[split]
        return stream.iteration(self.stepper.topology, first_sample) if stream is not None else None
