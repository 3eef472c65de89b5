"""Where a run begins: from a snapshot, a ``--load`` checkpoint or nothing; and what takes its snapshots from there."""

from __future__ import annotations

import socket

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.training import checkpoint_contents as contents
from megatron.training.agreement import agreed, gather
from megatron.training.checkpoint_contents import Position
from megatron.training.checkpointing import Checkpoints
from megatron.training.config import Config
from megatron.training.initialize import World
from megatron.training.logging import Log
from megatron.training.model_shape import model_shape
from megatron.training.optimizer import VotedOptimizer
from megatron.training.snapshot_loading import SnapshotLoader
from megatron.training.snapshot_tiers import Tiers
from megatron.training.snapshots import NoSnapshots, Snapshots
from moc.policy import Policy, interval_named, policy_named
from moc.sharding import scheme_named
from moc.sharding.shares import Stage, describe, pack, unpack
from moc.snapshot.contents import Contents
from moc.snapshot.saver import Saver
from moc.state.detail import Detail
from moc.state.shape import model_operators
from moc.state.training_state import TrainingState
from moc.store.candidates import MEMORY
from moc.store.locate import place_of
from moc.store.store import Store
from moc.store.tiers import memory_place


def begin(
    config: Config,
    world: World,
    chunks: list[DistributedDataParallel],
    optimizer: VotedOptimizer,
    scheduler: OptimizerParamScheduler,
    vocab_size: int,
    checkpoints: Checkpoints,
    log: Log,
) -> tuple[Position, Snapshots | NoSnapshots]:
    """Loads the newest state that there is; a collective call.

    Returns:
        Where to go on, and what takes snapshots from there.

    Raises:
        CheckpointError: on all workers: nothing whole to load although there is something, another model, another
            job in the same directory, no memory for snapshots.
    """
    if config.snapshot.ckpt_policy is None:
        return checkpoints.load() or Position(), NoSnapshots()
    tiers = _tiers(config, world)
    agreed(lambda: _take_places(tiers, world), "cannot use a directory for snapshots")
    state, policy = TrainingState(chunks, optimizer.core), _policy(config, vocab_size)

    loader = SnapshotLoader(config, world, state, optimizer, scheduler, tiers, policy, log)
    dense = checkpoints.newest()
    found = [candidate for candidate in loader.find() if dense is None or candidate.iteration >= dense]
    loaded = loader.load(found, must=dense is None)
    position = loaded[1] if loaded else checkpoints.load() or Position()
    recovered = loaded[0].iteration if loaded and loaded[0].tier == MEMORY else None

    agreed(lambda: _tidy(tiers, world, position.iteration, recovered), "cannot tidy up old snapshots")
    snapshots = Snapshots(
        world=world,
        policy=policy,
        contents=Contents(state, _stage(state), world.rank, scheme_named(config.snapshot.ckpt_sharding)),
        saver=Saver(world.rank, world.device, tiers.memory, tiers.storage),
        tiers=tiers,
        describe=lambda at: {
            **contents.training_state(config, world, at, optimizer, scheduler),
            "optimizer": config.regularization.optimizer,
            "interval": policy.interval.state_dict(),
        },
        layout=_layout(config, world),
        blocking=config.snapshot.ckpt_blocking,
        recovered=recovered,
        newest=position.iteration if loaded else None,
        log=log,
    )
    snapshots.reserve()
    return position, snapshots


def _tiers(config: Config, world: World) -> Tiers:
    snapshot, directory = config.snapshot, config.snapshot_dir
    hosts = gather(socket.gethostname())
    node = tuple(rank for rank, host in enumerate(hosts) if host == hosts[world.rank])
    in_memory = snapshot.ckpt_tier == "memory"
    return Tiers(
        storage=Store(place_of(directory)),
        memory=Store(memory_place(snapshot.ckpt_memory_dir, directory)) if in_memory else None,
        leads_node=world.rank == node[0],
        node=node,
        persist_interval=snapshot.persist_interval,
        keep=snapshot.ckpt_keep,
    )


def _take_places(tiers: Tiers, world: World) -> None:
    if world.rank == 0:
        tiers.storage.place.lock()
    if tiers.memory is not None and tiers.leads_node:
        tiers.memory.place.lock()


def _policy(config: Config, vocab_size: int) -> Policy:
    snapshot = config.snapshot
    operators = model_operators(model_shape(config.network, config.moe, vocab_size))
    interval = interval_named(snapshot.snapshot_interval, snapshot.ckpt_overhead_budget)
    return policy_named(snapshot.ckpt_policy)(operators, interval)


def _tidy(tiers: Tiers, world: World, iteration: int, recovered: int | None) -> None:
    """Takes out of the way what the run will take anew, and what killed jobs have left behind."""
    if world.rank == 0:
        for newer in tiers.storage.iterations():
            if newer > iteration:
                tiers.storage.set_aside(newer)
        tiers.storage.clear_unpublished()
    if tiers.memory is not None and tiers.leads_node:
        tiers.memory.place.remove("slots")
        for other in tiers.memory.iterations():
            if other != recovered:
                tiers.memory.remove(other)
        tiers.memory.clear_unpublished()


def _stage(state: TrainingState) -> Stage:
    """What the workers of this pipeline stage hold: they are all that may hold copies of one another."""
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    told = [
        holding
        for detail in (Detail.FULL, Detail.COMPUTE)
        for holding in describe(state.fragments(state.operators(), detail), detail)
    ]
    return Stage({rank: unpack(text) for rank, text in gather((dist.get_rank(), pack(told)), group)})


def _layout(config: Config, world: World) -> dict[str, int]:
    parallel = config.parallel
    return {
        "world": world.size,
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "ep": parallel.expert_model_parallel_size,
        "expert_tp": parallel.expert_tensor_parallel_size,
        "vpp": config.virtual_pipeline_model_parallel_size or 1,
    }
