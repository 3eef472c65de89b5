"""Device, process groups, random streams and injected faults of one worker."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron.pretraining.config import (
    Config,
    check_faults,
    check_fewest,
    check_placement,
    check_world,
    train_iterations,
)
from megatron.pretraining.config.deterministic import deterministic_environment
from megatron.pretraining.process import cpu
from megatron.pretraining.process.nodes import (
    continues_in_process,
    parts_of_model,
    per_node,
    workers_of_job,
)
from moc.cli_output import print_lines
from moc.events import EventLog
from moc.fault_points import on_reach
from moc.runtime.environment import min_nodes
from moc.runtime.fault_injection import Injector
from moc.runtime.job import Job, World

COLLECTIVES_ONLY = """
    DATA_PARALLEL_GROUP DATA_PARALLEL_GROUP_WITH_CP DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT
    DATA_PARALLEL_GROUP_WITH_GTP_REMAT EMBEDDING_GROUP EXPERT_DATA_PARALLEL_GROUP
    EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT EXPERT_MODEL_PARALLEL_GROUP EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP
    EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP
    EXPERT_TENSOR_PARALLEL_GROUP INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP
    INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP MODEL_PARALLEL_GROUP POSITION_EMBEDDING_GROUP
    TENSOR_AND_CONTEXT_PARALLEL_GROUP TENSOR_AND_DATA_PARALLEL_GROUP TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP
    TENSOR_MODEL_PARALLEL_GROUP
""".split()
"""Descriptions of megatron-core's groups without point-to-point transfers.

Groups of pipeline stages and ring attention (context parallelism) have such transfers.
"""


def take_parts(config: Config, job: Job) -> None:
    """Sets the number of nodes of a model copy, before the job connects its workers.

    Raises:
        ConfigError: the flags do not fit the number of workers.
    """
    job.nodes_per_model = parts_of_model(config)
    workers_per_copy = job.nodes_per_model * per_node()  # the job connects a multiple of the workers of one model copy
    workers = job.size - len(job.partial_model_parts) * per_node()
    workers = workers // workers_per_copy * workers_per_copy if job.nodes_per_model > 1 else workers
    check_world(config, workers)
    check_placement(config, workers, workers_of_job())
    if (fewest := min_nodes()) is not None:
        check_fewest(config, fewest, per_node())


def let_regroup(config: Config, job: Job, build: Callable[[], None]) -> None:
    """Lets the job rebuild all process groups, if workers continue in process after a membership change."""

    def regroup() -> None:
        parallel_state.destroy_model_parallel()
        build()

    if continues_in_process(config):
        job.recreate_groups = regroup


def world_of(job: Job) -> World:
    """Returns this worker's coordinates in the process groups of the current generation."""
    data_size = parallel_state.get_data_parallel_world_size()
    if job.partial_model_parts:
        sizes = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size()
        model = math.prod(sizes) * parallel_state.get_pipeline_model_parallel_world_size()
        data_size = (job.size - len(job.partial_model_parts) * per_node()) // model
    return World(
        rank=job.rank,
        size=job.size,
        device=cpu.device(),
        backend=dist.get_backend(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=data_size,
        job=job,
    )


def shut_down(job: Job | None = None) -> None:
    """Leaves the job; no collective works afterwards."""
    parallel_state.destroy_model_parallel()
    (job or Job()).leave()


def seed_streams(seed: int, iteration: int, world: World, micro_batch: int | None = None) -> None:
    """Reseeds every random stream for one iteration, or for one of its micro batches.

    The streams depend only on (seed, iteration, stage, data-parallel rank or micro batch). megatron-core's tracker adds
    the tensor- and expert-parallel coordinates. So any iteration can be replayed separately, and a checkpoint holds no
    random state. Tensor-parallel peers share the default stream, as dropout outside of tensor-parallel regions
    requires.
    """
    entropy = (seed, iteration, world.pipeline_rank, world.data_rank if micro_batch is None else micro_batch)
    # 32 bits is numpy's limit; the halving leaves room for megatron-core's own offsets of a few thousand
    base = int(numpy.random.SeedSequence(entropy).generate_state(1, numpy.uint32)[0]) // 2
    random.seed(base)
    numpy.random.seed(base)
    torch.manual_seed(base)
    tensor_parallel.model_parallel_cuda_manual_seed(base)


def be_deterministic(config: Config) -> None:
    """Makes CUDA, cuBLAS, NCCL and Transformer Engine deterministic, before any of them is used.

    Raises:
        ConfigError: the environment or another flag requires the opposite.
    """
    os.environ.update(deterministic_environment(config, os.environ))
    torch.use_deterministic_algorithms(True)
    # nothing here reads memory before it is written, and filling every torch.empty() costs bandwidth
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    # A resumed or replayed run has shapes in another order, and torch.compile may then generate other kernels.
    torch.compiler.set_stance("force_eager")


def inject_faults(config: Config, job: Job) -> None:
    """Arms the faults that the flags name; raises ConfigError if they name workers that do not exist."""
    if not config.faults.is_enabled:
        return
    faults = config.faults.planned(job.size, train_iterations(config, job.size))
    check_faults(faults, job.size)
    assert config.logging.log_dir is not None  # required by the fault flags
    directory, node = Path(config.logging.log_dir), int(os.environ.get("GROUP_RANK", "0"))

    def record(event: dict) -> None:
        events = EventLog(directory)  # opened here, since rank 0 owns the run's event log
        events.write("inject", **event)  # a completed write survives the process
        events.close()
        print_lines("injected: {action} of worker {rank} in iteration {iteration}, {point}".format(**event), flush=True)

    on_reach(Injector(faults, job.rank, node, directory / "injected", record).reached)
