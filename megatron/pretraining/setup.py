"""Builds the parts of a worker and restores the state to resume from."""

from __future__ import annotations

import socket
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from megatron.pretraining.checkpoint.background import Saves
from megatron.pretraining.config import Config, ConfigError, why_anew
from megatron.pretraining.config.deterministic import is_exact
from megatron.pretraining.data.identity import DataError, DataIdentity, difference
from megatron.pretraining.duties import Done, Duties, missed
from megatron.pretraining.elastic.membership import Guests, describe_replicas, hand_over, is_settled, migrate, settle
from megatron.pretraining.elastic.moe_layer import ElasticTurns, elastic_layers
from megatron.pretraining.elastic.placement import NodesOfStages, Plans
from megatron.pretraining.elastic.rebalancing import Rebalancer
from megatron.pretraining.elastic.replicas import Replicas
from megatron.pretraining.elastic.state_transfer import Shards
from megatron.pretraining.engine.boundary import NoNeighbours
from megatron.pretraining.engine.megatron import MegatronEngine
from megatron.pretraining.engine.owned import sharded_part
from megatron.pretraining.engine.schedule import Turns
from megatron.pretraining.engine.step import Stepper
from megatron.pretraining.engine.upstream import boundaries
from megatron.pretraining.logging.records import EventRecorder
from megatron.pretraining.parts import TrainingRun, WorkerParts
from megatron.pretraining.process.nodes import goes_on_in_process, per_node
from megatron.pretraining.process.phases import Phases
from megatron.pretraining.process.stopping import StopRequests
from megatron.pretraining.process.topology import Topology
from megatron.pretraining.session import settings_of
from moc.fault_points import reach
from moc.runtime.collectives import gather, run_on_rank0, sum_over_workers
from moc.runtime.environment import min_nodes
from moc.session.session import Session
from moc.session.tiers import LIVE_LOOKING_S, LOOKING_S


def track_moving_state(parts: WorkerParts, plans: Plans, nodes: NodesOfStages) -> None:
    """With ``--elastic``, sets the state that moves between workers: expert replicas and dense optimizer shards.

    Raises:
        ConfigError: modules of a user have state that cannot move.
    """
    if parts.modules.of_users:
        raise ConfigError(
            f"--elastic: user modules of {next(iter(parts.modules.of_users))} keep values of their own, which cannot "
            "move between nodes. Fix: drop --elastic, or keep the values in parameters",
            code="elastic-excludes-module-state",
        )
    core, layers, dispatch = parts.optimizer.core, elastic_layers(parts.chunks), parts.config.elastic.elastic_dispatch
    parts.replicas = Replicas(layers, core, plans, nodes, dispatch)
    if (sharded := sharded_part(core)) is not None:
        parts.shards = Shards(parts.config, sharded, nodes[parts.world.pipeline_rank])


def announce_restarts(config: Config, log: EventRecorder) -> None:
    """With ``--elastic``, reports why workers cannot continue in the same processes, if they cannot."""
    why = why_anew(config, per_node())
    if config.elastic.elastic and why and min_nodes() is not None:
        log.message(f"{why}, all workers restart when nodes are lost or added: they {_goes_on_from(config)}")


def _goes_on_from(config: Config) -> str:
    """Describes the state that restarted workers begin with."""
    if config.snapshot.ckpt_policy is not None:
        return "resume from --ckpt-dir"
    if config.checkpoint.load:
        return "resume from --load"
    if config.checkpoint.save:
        return "resume from --save"
    return "begin again, since neither --ckpt-dir, --save nor --load is given"


def start(parts: WorkerParts, stop: StopRequests, phases: Phases) -> TrainingRun:
    """Starts a generation: resumes all workers from the same position.  A collective call.

    Raises:
        ConfigError, CheckpointError: a flag names something unusable.
        StopRequested: a worker received a stop request, and no worker has state to save.
        NoRecoveryPoint: this worker has already trained, and no snapshot can restore it.
    """
    config, world, log = parts.config, parts.world, parts.log
    loses = parts.remains.trained or stop.may_lose(world.job)
    stop.check_set_up(world, loses)  # the first collective of a generation
    parts.data = common_data(parts.data)
    phases.done("meet")
    program, topology = parts.program, parts.program.topology(config, world)
    crossing = boundaries(config, parts.chunks[0].config, topology, log.message, parts.log_memory)
    stepper = Stepper(
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
        boundaries=crossing,
    )
    under_way = parts.replicas is not None and _settle(config, parts, parts.replicas)
    model = program.model(parts)
    engine = MegatronEngine(config, stepper, parts.streams["train"], parts.replicas, model, parts.data)
    checkpoints = program.checkpoints(parts, model)
    session = Session(engine, settings_of(config, engine), log, parts.remains, checkpoints, parts.auto)
    position = session.resume()
    parts.session, parts.checkpoints = session, checkpoints
    if parts.replicas is not None:
        parts.rebalancer = Rebalancer(config, engine, parts.replicas, parts.shards, parts.vocabulary_rows)
        if not is_settled(parts.replicas, parts.shards):
            migrate(parts.replicas, parts.shards, engine, session, log)
        elif not under_way:
            parts.rebalancer.restore(session.moving)  # to the placement of experts in the snapshot
        if parts.replicas.plans:
            log.message(describe_replicas(parts.replicas.plans, config.elastic.elastic_min_replicas))
    guests = None
    if parts.replicas is not None and min_nodes() is not None and goes_on_in_process(config):
        guests = Guests(world, partial(hand_over, config, parts.replicas, parts.shards, engine, session, log))
    stepper = replace(stepper, participants=tuple(filter(None, (session, parts.rebalancer, guests))))
    log.catch_up(session.record, position.consumed_samples, session.gauges)
    parts.remains.trained = position.iteration > 0  # at iteration 0, set-up can still rebuild the initial model
    reach("loaded")
    stops = stop.check_set_up(world, loses and position.iteration > 0)
    phases.done("load")

    splits = _splits_with_data(parts)
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
    lacks = _missed(parts, session, checkpoints, engine.saved_by)
    parts.began = position.iteration if parts.began is None else parts.began
    data = parts.streams, splits, parts.train_iters, parts.vocabulary_rows, parts.rebalancer, guests
    run = config, world, program, stepper, checkpoints, session, parts.auto, log
    return TrainingRun(*run, *data, stops=stops, missed=lacks)


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


def common_data(mine: DataIdentity | None) -> DataIdentity | None:
    """Returns the identity of the data that all workers read, also on workers that read none; a collective call.

    Raises:
        DataError: on all workers: some read other data.
    """
    digests = gather(None if mine is None else mine.digest)
    readers = [rank for rank, digest in enumerate(digests) if digest is not None]
    if not readers:
        return None
    first, rank = readers[0], dist.get_rank()
    other = next((reader for reader in readers if digests[reader] != digests[first]), first)
    found = gather((socket.gethostname(), mine) if rank in (first, other) else None)
    if other != first:
        (host, reference), (other_host, deviating) = found[first], found[other]
        raise DataError(
            f"worker {other} on {other_host} reads other data than worker {first} on {host}: "
            f"{difference(reference, deviating)}. Fix: copy the data and the tokenizer to all nodes from the same "
            "source, and remove cached indices that differ",
            code="data-differs-between-nodes",
        )
    return found[first][1] if mine is None else mine


def _missed(parts: WorkerParts, session: Session, checkpoints: Saves, saved_by: str | None) -> Duties:
    """Returns the duties of the last completed iteration that are not done; a collective call."""
    at, record, log, job = session.position.iteration, session.record, parts.log, parts.world.job

    def known() -> list:
        by_run = record is not None or log.has(at)
        newest = checkpoints.newest_saved(LIVE_LOOKING_S if here else LOOKING_S)
        saved = at if newest is None else newest  # without an answer, nothing counts as missed: the next save is due
        return [log.was_evaluated(at), saved, by_run, record is not None and record.stop]

    if not at:
        return Duties()
    here = any(gather(parts.began is not None and parts.began < at))
    evaluated, saved, by_run, stops = run_on_rank0(known, "cannot look for saves and evaluations")
    by_job = here or any(gather(saved_by == job.id))
    done = Done(at if evaluated else 0, saved, by_run=by_run, by_job=by_job, by_workers=here)
    return missed(parts.config, at, stops, done)


def _settle(config: Config, parts: WorkerParts, replicas: Replicas) -> bool:
    """Agrees on the location of state; returns whether it is where a running job has placed it.

    If experts are on no worker, they are loaded, and their holders lack them until then.  If other state is on no
    worker, the workers discard their live state and load the newest checkpoint.
    """
    settled = settle(config, replicas, parts.shards, parts.remains.trained, parts.world.job.partial_model_parts)
    if settled.lost:
        reason = f"no worker that is left holds {settled.lost}"
        goes_on = "a checkpoint is read for them" if settled.experts else "all go back to the newest checkpoint"
        parts.log.message(f"{reason}: {goes_on}")
        parts.log.events.write("fallback", reason=reason, experts=settled.experts)
        parts.remains.lacking |= settled.lacking
        if not settled.experts:
            parts.remains.live = None
    return settled.under_way


def alone_of(parts: WorkerParts) -> NoNeighbours | None:
    """Returns the substitute for a pipeline communicator on a worker without neighbours."""
    return NoNeighbours(parts.chunks[0].config) if parts.world.is_partial_model else None


def turns_of(parts: WorkerParts, topology: Topology) -> Turns:
    """Returns the hooks of a worker's micro batches."""
    seed = parts.config.rng.seed
    if not parts.config.elastic.elastic:
        return Turns(seed, topology)
    return ElasticTurns(seed, topology, elastic_layers(parts.chunks))


def count_parameters(chunks) -> int:
    """Returns the number of parameters that this worker holds."""
    return sum(p.numel() for chunk in chunks for p in chunk.parameters())
