"""Builds the parts of a worker and restores the state to resume from."""

from __future__ import annotations

import ctypes
import gc
import socket
import time
from dataclasses import replace
from statistics import median

import torch.distributed as dist

from megatron.pretraining.checkpoint.background import Saves
from megatron.pretraining.config import ConfigError, train_samples
from megatron.pretraining.config.deterministic import is_exact
from megatron.pretraining.data.identity import DataError, DataIdentity, difference
from megatron.pretraining.duties import Done, Duties, due, missed
from megatron.pretraining.engine.boundary import NoNeighbours
from megatron.pretraining.engine.megatron import MegatronEngine
from megatron.pretraining.engine.schedule import MicroBatchHooks
from megatron.pretraining.engine.step import Stepper
from megatron.pretraining.engine.upstream import boundaries
from megatron.pretraining.logging.records import print_rank_0
from megatron.pretraining.logging.startup import (
    describe_data,
    describe_devices,
    describe_layout,
    describe_logs,
    describe_parameters,
    describe_policy,
    expected_failure_cost,
    gather_facts,
    stage_lines,
    summary_lines,
    versions,
)
from megatron.pretraining.parts import Callback, TrainingRun, WorkerParts
from megatron.pretraining.process.phases import Phases
from megatron.pretraining.process.stopping import StopRequests
from megatron.pretraining.process.topology import Topology
from megatron.pretraining.session import PolicySwitch, settings_of
from moc.fault_points import reach
from moc.runtime.collectives import gather, run_on_rank0, sum_over_workers
from moc.session.session import Session
from moc.session.tiers import LIVE_LOOKING_S, LOOKING_S

_MEASURED = 10
"""Iterations of a launch before it prints the seconds that a lost worker costs."""


def start(parts: WorkerParts, stop: StopRequests, phases: Phases) -> TrainingRun:
    """Starts a generation: resumes all workers from the same position.  A collective call.

    Raises:
        ConfigError, CheckpointError: a flag names something unusable.
        StopRequested: a worker received a stop request, and no worker has state to save.
        NoRecoveryPoint: this worker has already trained, and no snapshot can restore it.
    """
    config, world, log = parts.config, parts.world, parts.log
    would_lose_state = parts.remains.trained or stop.may_lose(world.job)
    stop.check_set_up(world, would_lose_state)  # the first collective of a generation
    parts.data = agree_on_data(parts.data)
    phases.done("meet")
    program, topology = parts.program, parts.program.topology(config, world)
    stepper = _stepper(parts, topology)
    if parts.moving is not None:
        parts.moving.settle(parts)
    model, replicas = program.model(parts), None if parts.moving is None else parts.moving.replicas
    checkpoints = program.checkpoints(parts, model)
    engine = MegatronEngine(config, stepper, parts.streams["train"], replicas, model, parts.data, checkpoints.beginning)
    session = Session(engine, settings_of(config, engine), log, parts.remains, checkpoints, parts.auto)
    position = session.resume()
    if world.job.term[1] == 0:
        checkpoints.check_beginning(engine.loaded_beginning)
    parts.session, parts.checkpoints = session, checkpoints
    parts.callbacks = _callbacks(parts, engine, session)
    stepper = replace(stepper, participants=(session, *parts.callbacks))
    log.catch_up(session.record, position.consumed_samples, session.gauges)
    parts.remains.trained = position.iteration > 0  # at iteration 0, set-up can still rebuild the initial model
    reach("loaded")
    stop_requested = stop.check_set_up(world, would_lose_state and position.iteration > 0)
    phases.done("load")

    splits = _splits_with_data(parts)
    if world.job.term[1] == 0:  # a replaced worker joins others that have been described
        _describe(parts, session, engine)
        phases.done("describe")
    log.events.write(
        "start",
        iteration=position.iteration,
        run=session.run,
        job=world.job.id,
        term=world.job.term,
        world_size=world.size,
        parameters=count_parameters(parts.chunks),
        startup_s=phases.seconds,
        exact=is_exact(config, world.device.type == "cuda"),
    )
    parts.remains.trained = True
    missed_duties = _missed_duties(parts, session, checkpoints, engine.saved_by)
    parts.initial_iteration = position.iteration if parts.initial_iteration is None else parts.initial_iteration
    return TrainingRun(
        config=config,
        world=world,
        program=program,
        stepper=stepper,
        checkpoints=checkpoints,
        session=session,
        callbacks=parts.callbacks,
        log=log,
        streams=parts.streams,
        splits=splits,
        train_iters=parts.train_iters,
        stop_requested=stop_requested,
        missed=missed_duties,
    )


def _stepper(parts: WorkerParts, topology: Topology) -> Stepper:
    """Returns the object that computes iterations, without the participants in its commit all-reduce."""
    config, program = parts.config, parts.program
    return Stepper(
        topology=topology,
        chunks=parts.chunks,
        modules=parts.modules,
        schedule=program.schedule(parts, topology),
        optimizer=parts.optimizer,
        scheduler=parts.scheduler,
        auxiliary=program.auxiliary(parts, topology),
        params_norm=config.logging.log_params_norm,
        count_zeros=config.logging.log_num_zeros_in_grad,
        refuse_non_finite=config.training.check_for_nan_in_loss_and_grad,
        boundaries=boundaries(config, parts.chunks[0].config, topology, parts.log.message, parts.log_memory),
    )


def _callbacks(parts: WorkerParts, engine: MegatronEngine, session: Session) -> tuple[Callback, ...]:
    """Returns the generation's callbacks, in the order of their calls; a collective call."""
    training = parts.config.training
    return (
        *parts.program.callbacks(parts.world),
        GarbageCollection(training.manual_gc, training.manual_gc_interval),
        *(() if parts.moving is None else parts.moving.callbacks(parts, engine, session)),
        *(() if parts.auto is None else (PolicySwitch(parts.auto),)),
        *(() if parts.world.job.term[1] else (FailureCostReport(parts, session),)),
    )


def _describe(parts: WorkerParts, session: Session, engine: MegatronEngine) -> None:
    """Prints what the run is, before its first iteration; a collective call."""
    config, world = parts.config, parts.world
    workers = gather_facts(world, count_parameters(parts.chunks))
    summary: dict[str, str | list[str]] = {
        "versions": versions(),
        "devices": describe_devices(workers),
        "layout": [describe_layout(config, world), *stage_lines(workers, engine.stages)],
        "parameters": describe_parameters(engine.operators, config.moe.moe_router_topk or 1),
        "data": describe_data(parts.data_sizes, train_samples(config, world.size), config.data.seq_length),
        "policy": describe_policy(
            session.policy,
            config.snapshot.ckpt_tier,
            save_interval_of(parts),
            parts.log.events.newest("iteration").get("elapsed_s"),  # of an earlier launch
        ),
        "logs": describe_logs(config),
    }
    print_rank_0(world, " the run, besides the options above:", *summary_lines(summary))


def _splits_with_data(parts: WorkerParts) -> set[str]:
    """Returns the splits that any worker has data of; a collective call.

    Raises:
        ConfigError: on all workers: there is nothing to train on.
    """
    reads = {split: float(stream is not None and stream.has_data) for split, stream in parts.streams.items()}
    splits = {split for split, count in sum_over_workers(reads, parts.world).items() if count}
    if "train" not in splits:
        raise ConfigError(
            "the data leave nothing to train on. Fix: make the first number of --split greater than 0",
            code="split-empty",
        )
    return splits


def agree_on_data(local_identity: DataIdentity | None) -> DataIdentity | None:
    """Returns the identity of the data that all workers read, also on workers that read none; a collective call.

    Raises:
        DataError: on all workers: some read other data.
    """
    digests = gather(None if local_identity is None else local_identity.digest)
    readers = [rank for rank, digest in enumerate(digests) if digest is not None]
    if not readers:
        return None
    first_rank, rank = readers[0], dist.get_rank()
    other_rank = next((reader for reader in readers if digests[reader] != digests[first_rank]), first_rank)
    identities = gather((socket.gethostname(), local_identity) if rank in (first_rank, other_rank) else None)
    if other_rank != first_rank:
        (host, reference), (other_host, deviating) = identities[first_rank], identities[other_rank]
        raise DataError(
            f"worker {other_rank} on {other_host} reads other data than worker {first_rank} on {host}: "
            f"{difference(reference, deviating)}. Fix: copy the data and the tokenizer to all nodes from the same "
            "source, and remove cached indices that differ",
            code="data-differs-between-nodes",
        )
    return identities[first_rank][1] if local_identity is None else local_identity


def _missed_duties(parts: WorkerParts, session: Session, checkpoints: Saves, saved_by: str | None) -> Duties:
    """Returns the duties of the last completed iteration that are not done; a collective call."""
    iteration, record, log, job = session.position.iteration, session.record, parts.log, parts.world.job

    def look_up() -> list:
        by_run = record is not None or log.has(iteration)
        newest = checkpoints.newest_saved(LIVE_LOOKING_S if workers_continue else LOOKING_S)
        saved = committed if newest is None else newest  # storage has not answered
        return [log.was_evaluated(iteration), saved, by_run, record is not None and record.stop]

    if not iteration:
        return Duties()
    workers_continue = any(gather(parts.initial_iteration is not None and parts.initial_iteration < iteration))
    committed = max(gather(parts.saved))
    evaluated, saved, by_run, stop_requested = run_on_rank0(look_up, "cannot look for saves and evaluations")
    parts.saved = saved
    by_job = workers_continue or any(gather(saved_by == job.id))
    done = Done(iteration if evaluated else 0, saved, by_run=by_run, by_job=by_job, by_workers=workers_continue)
    return missed(parts.config, iteration, stop_requested, done)


def pipeline_substitute(parts: WorkerParts) -> NoNeighbours | None:
    """Returns the substitute for a pipeline communicator on a worker without neighbours."""
    return NoNeighbours(parts.chunks[0].config) if parts.world.is_partial_model else None


def micro_batch_hooks(parts: WorkerParts, topology: Topology) -> MicroBatchHooks:
    """Returns the hooks of a worker's micro batches."""
    seed = parts.config.rng.seed
    return MicroBatchHooks(seed, topology) if parts.moving is None else parts.moving.micro_batch_hooks(seed, topology)


class GarbageCollection(Callback):
    """Exempts the objects of set-up from garbage collection; with ``--manual-gc``, collects every few iterations.

    Args:
        manual: ``--manual-gc``.
        interval: ``--manual-gc-interval``.
    """

    def __init__(self, manual: bool, interval: int | None):
        self._manual, self._interval = manual, interval

    def before_training(self, run: TrainingRun) -> None:
        gc.collect()
        gc.freeze()
        release_free_memory()
        if self._manual:
            gc.disable()

    def after_iteration(self, run: TrainingRun) -> None:
        if due(self._interval, run.position.iteration):
            gc.collect()


class FailureCostReport(Callback):
    """Prints the expected cost of a lost worker in seconds, when a launch has measured some iterations.

    Args:
        parts: of this worker.
        session: session whose policy is in force.
    """

    def __init__(self, parts: WorkerParts, session: Session):
        self._log, self._session, self._save_interval = parts.log, session, save_interval_of(parts)
        self._elapsed_s, self._started_at = list[float](), 0.0

    def before_iteration(self, run: TrainingRun) -> None:
        self._started_at = time.perf_counter()

    def after_iteration(self, run: TrainingRun) -> None:
        if len(self._elapsed_s) == _MEASURED:
            return
        self._elapsed_s.append(time.perf_counter() - self._started_at)
        cost = expected_failure_cost(self._session.policy, self._save_interval)
        if len(self._elapsed_s) == _MEASURED and cost is not None:
            self._log.message(cost.described(median(self._elapsed_s)))


def save_interval_of(parts: WorkerParts) -> int | None:
    """Returns the iterations between checkpoints of ``--save``; None without checkpoints before the end."""
    interval = parts.config.checkpoint.save_interval
    return interval if parts.config.checkpoint.save and interval and interval < parts.train_iters else None


def release_free_memory() -> None:
    """Returns free C heap memory to the system (glibc only); set-up cannot reuse the holes of earlier generations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def count_parameters(chunks) -> int:
    """Returns the number of parameters that this worker holds."""
    return sum(p.numel() for chunk in chunks for p in chunk.parameters())
