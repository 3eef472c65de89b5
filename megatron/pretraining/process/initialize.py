"""Device, process groups and random streams of one worker."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron.pretraining.config import (
    Config,
    check_backend,
    check_fewest,
    check_placement,
    check_world,
)
from megatron.pretraining.config.deterministic import deterministic_environment
from megatron.pretraining.elastic.domains import build_domains
from megatron.pretraining.process import cpu
from megatron.pretraining.process.nodes import (
    goes_on_in_process,
    order_of_ranks,
    parts_of_model,
    per_node,
    workers_of_job,
)
from moc.runtime.environment import fewest_nodes, numbers_of_nodes
from moc.runtime.job import Job
from moc.runtime.world import World

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
"""Descriptions of megatron-core's groups without transfers from rank to rank.

Pipeline stages and ring attention (context parallelism) have transfers.
"""


def initialize(config: Config, job: Job | None = None) -> World:
    """Joins the job (by default the one that torchrun's environment describes) and builds every process group.

    Raises:
        ConfigError: the flags do not fit the number of workers or the backend.
    """
    job = job or Job()
    take_parts(config, job)
    backend = config.parallel.distributed_backend or cpu.default_backend()
    check_backend(config, backend, torch.cuda.is_available())
    _choose_device(config)
    job.collectives_only = COLLECTIVES_ONLY
    job.unbatched = ["PIPELINE_MODEL_PARALLEL_GROUP"] if config.overlaps_p2p else []
    job.connect(backend, timedelta(minutes=config.parallel.distributed_timeout_minutes), cpu.device())
    build = partial(_build_groups, config, job)
    build()
    let_regroup(config, job, build)
    world = world_of(job)
    seed_streams(config.rng.seed, 0, world)
    return world


def take_parts(config: Config, job: Job) -> None:
    """Sets the number of nodes that a copy of the model takes, before the job connects its workers.

    Raises:
        ConfigError: the flags do not fit the number of workers.
    """
    job.parts = parts_of_model(config)
    at_once = job.parts * per_node()  # the job connects a multiple of the workers of one copy of the model
    workers = job.size - len(job.helpers) * per_node()
    workers = workers // at_once * at_once if job.parts > 1 else workers
    check_world(config, workers)
    check_placement(config, workers, workers_of_job())
    if (fewest := fewest_nodes()) is not None:
        check_fewest(config, fewest, per_node())


def let_regroup(config: Config, job: Job, build: Callable[[], None]) -> None:
    """Lets the job rebuild all process groups, if workers continue in the same processes with other members."""

    def regroup() -> None:
        parallel_state.destroy_model_parallel()
        build()

    if goes_on_in_process(config):
        job.regroup = regroup


def world_of(job: Job) -> World:
    """This worker's place in the process groups of the current generation."""
    data_size = parallel_state.get_data_parallel_world_size()
    if job.helpers:
        sizes = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size()
        model = math.prod(sizes) * parallel_state.get_pipeline_model_parallel_world_size()
        data_size = (job.size - len(job.helpers) * per_node()) // model
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

    The streams depend on (seed, iteration, stage, data-parallel rank, or micro batch in its place) only;
    megatron-core's tracker adds the tensor- and expert-parallel coordinates.  Any iteration can therefore be replayed
    by itself, and a checkpoint holds no random state.  Tensor-parallel peers share the default stream, as dropout
    outside of tensor-parallel regions requires.
    """
    entropy = (seed, iteration, world.pipeline_rank, world.data_rank if micro_batch is None else micro_batch)
    # 32 bits is numpy's limit; the halving leaves room for megatron-core's own offsets of a few thousand
    base = int(numpy.random.SeedSequence(entropy).generate_state(1, numpy.uint32)[0]) // 2
    random.seed(base)
    numpy.random.seed(base)
    torch.manual_seed(base)
    tensor_parallel.model_parallel_cuda_manual_seed(base)


def _choose_device(config: Config) -> None:
    if torch.cuda.is_available():
        if config.training.deterministic_mode:
            be_deterministic(config)
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    elif "OMP_NUM_THREADS" not in os.environ:
        # one thread per worker: results do not depend on the machine, and workers do not compete for cores
        torch.set_num_threads(1)


def be_deterministic(config: Config) -> None:
    """Makes CUDA, cuBLAS, NCCL and Transformer Engine deterministic, before any of them is used.

    Raises:
        ConfigError: the environment or another flag asks for the contrary.
    """
    os.environ.update(deterministic_environment(config, os.environ))
    torch.use_deterministic_algorithms(True)
    # nothing here reads memory before it is written, and filling every torch.empty() costs bandwidth
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    # A resumed or replayed run meets shapes in another order, for which torch.compile may generate other kernels.
    torch.compiler.set_stance("force_eager")


def _build_groups(config: Config, job: Job) -> None:
    parallel = config.parallel
    with order_of_ranks(config, job.helpers):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=parallel.expert_model_parallel_size,
            expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
            distributed_timeout_minutes=int(parallel.distributed_timeout_minutes),
            create_gloo_process_groups=False,
        )
        build_domains(config, numbers_of_nodes()[1] * per_node() if fewest_nodes() is not None else job.size)
