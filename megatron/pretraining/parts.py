"""Defines a training program, the parts of a worker that it builds, and the run of a generation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.pretraining.checkpoint.background import Saves
from megatron.pretraining.config import Config
from megatron.pretraining.data.identity import DataIdentity
from megatron.pretraining.data.streams import Batch, BatchStream
from megatron.pretraining.duties import Duties
from megatron.pretraining.elastic.membership import Guests
from megatron.pretraining.elastic.rebalancing import Rebalancer
from megatron.pretraining.elastic.replicas import Replicas
from megatron.pretraining.elastic.state_transfer import Shards
from megatron.pretraining.engine.megatron import Model
from megatron.pretraining.engine.module_state import ModuleState
from megatron.pretraining.engine.optimizer import VotedOptimizer
from megatron.pretraining.engine.routing import AuxiliaryLosses
from megatron.pretraining.engine.schedule import Schedule, drop_unfinished_iteration
from megatron.pretraining.engine.step import Stepper
from megatron.pretraining.engine.upstream import LogMemory
from megatron.pretraining.logging.records import EventRecorder
from megatron.pretraining.logging.startup import DataSizes
from megatron.pretraining.process.initialize import world_of
from megatron.pretraining.process.phases import Phases
from megatron.pretraining.process.stopping import StopRequests
from megatron.pretraining.process.topology import Topology
from moc.runtime.job import Interruption, Job, World
from moc.session.auto import AutoPolicy
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

    def begin(self, run: TrainingRun) -> None:
        """Runs before each iteration."""
        ...

    def completed(self, run: TrainingRun) -> None:
        """Runs after each completed iteration."""
        ...

    def forget_iteration(self, parts: WorkerParts) -> None:
        """Clears state of an interrupted iteration or evaluation outside of :class:`WorkerParts`."""
        ...


@dataclass
class WorkerParts:
    """Parts of a worker that are built once and survive the loss of other workers.

    Attributes:
        world: this worker's rank and groups in the current generation.
        streams: readers of ``train``, ``valid`` and ``test``; None on stages that read no data.
        train_iters: iterations of the whole run.
        vocabulary_rows: rows of the embedding.
        data: identity of the data that this worker reads, or once the generation has started, any worker.
        data_sizes: sizes of the training data, if this worker reads files.
        session: session of the current generation, once it has started.
        checkpoints: dense checkpoints of ``--save``, once the generation has started.
        remains: state that this worker keeps when another worker is lost.
        log_memory: memory of its upstream logs, also kept.
        replicas: with ``--elastic``, replicas of experts.
        shards: with ``--elastic``, shards of the dense optimizer state, if it is sharded.
        rebalancer: rebalancer of the current generation; None without ``--elastic``.
        began: iterations completed before this worker began to train; None until then.
    """

    config: Config
    world: World
    chunks: list[DistributedDataParallel]
    modules: ModuleState
    optimizer: VotedOptimizer
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
    remains: LocalRemains = field(default_factory=LocalRemains)
    log_memory: LogMemory = field(default_factory=LogMemory)
    replicas: Replicas | None = None
    shards: Shards | None = None
    rebalancer: Rebalancer | None = None
    began: int | None = None

    def met(self, loss: Interruption | None) -> None:
        """Takes over the rank and groups of the generation in which all workers reconnected; logs it after a loss."""
        self.world = world_of(self.world.job)
        self.log.move(self.world)
        if loss is not None:
            what = {"generation": loss.generation, "cause": loss.cause, "reason": loss.reason, **loss.lost}
            seconds = {"noticed_s": loss.detection_s, "met_s": loss.reconnection_s}
            self.log.events.write("generation", **what, **seconds, job=self.world.job.id, term=self.world.job.term)
            self.log.message(
                f"generation {loss.generation}: {loss.reason}; all met again after {loss.reconnection_s:.2f} s"
            )

    def go_on_after(self, loss: Interruption | None) -> None:
        """Closes the interrupted session and resets everything except the state to between iterations."""
        self.met(loss)
        if self.checkpoints is not None:
            self.checkpoints.close()
        if self.session is not None:
            self.session.interrupt()
        if self.rebalancer is not None:
            self.rebalancer.close()
        self.session = self.checkpoints = self.rebalancer = None
        drop_unfinished_iteration(self.chunks, self.modules)
        self.program.forget_iteration(self)


@dataclass
class TrainingRun:
    """A worker's parts with the session that tracks its progress.

    Attributes:
        auto: as in :class:`WorkerParts`.
        streams: as in :class:`WorkerParts`.
        splits: the splits with data, identical on all workers.
        train_iters: iterations of the whole run.
        vocabulary_rows: rows of the embedding.
        rebalancer: as in :class:`WorkerParts`.
        guests: joining nodes; None if the number of nodes is fixed, or changes restart the workers.
        stops: a worker received a stop request during set-up, and there is state to save.
        missed: duties of the last completed iteration that are not done.
    """

    config: Config
    world: World
    program: Program
    stepper: Stepper
    checkpoints: Saves
    session: Session
    auto: AutoPolicy | None
    log: EventRecorder
    streams: dict[str, BatchStream | None]
    splits: set[str]
    train_iters: int
    vocabulary_rows: int
    rebalancer: Rebalancer | None = None
    guests: Guests | None = None
    stops: bool = False
    missed: Duties = Duties()

    @property
    def position(self) -> Position:
        """Iterations and samples completed."""
        return self.session.position

    def batches(self, split: str, first_sample: int) -> Iterator[Batch] | None:
        """Returns this worker's micro batches of a split from a sample on; None on stages that read no data."""
        stream = self.streams[split]
        return stream.iteration(self.stepper.topology, first_sample) if stream is not None else None
