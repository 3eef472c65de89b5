"""Values and checks that depend on the number of workers and on the machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron.pretraining.config.composed import Config
from megatron.pretraining.config.flag import ConfigError, Problems, UnknownValueError, refuse
from moc.elastic.settings import Settings
from moc.output import counted
from moc.runtime.inject import Fault


class Workers(NamedTuple):
    """The workers of a job.

    Attributes:
        least: nodes with which the job continues after others are lost.
        most: nodes of the job.
        per_node: workers of each node.
    """

    least: int
    most: int
    per_node: int


def data_parallel_size(config: Config, world_size: int) -> int:
    """Replicas of the model that read different samples."""
    return world_size // _model_size(config)


def stage_size(config: Config, world_size: int) -> int:
    """Workers of a pipeline stage: with ``--elastic``, those that can hold the experts of its layers."""
    return world_size // config.parallel.pipeline_model_parallel_size


def ranks_of_stage(config: Config, size: int, workers: Workers) -> int:
    """Workers of each node that are of one pipeline stage, where a job has so many workers in all.

    Where one node has all workers, and the job no others, each worker counts as a node.
    """
    varies = workers.least < workers.most
    here, of_stage = workers.per_node // stages_on_nodes(config, workers.per_node, varies), stage_size(config, size)
    apart = of_stage > here or nodes_have_places(config, workers)
    return here if apart and not of_stage % here else 1


def nodes_have_places(config: Config, workers: Workers) -> bool:
    """Whether nodes are known by their places: the job has several, and each has the same stages of all its copies."""
    by_copies = copy_by_copy(config, workers.per_node, workers.least < workers.most)
    return workers.most > 1 and (by_copies or config.parallel.pipeline_model_parallel_size == 1)


def why_anew(config: Config, per_node: int) -> str:
    """Why workers cannot go on in the same processes when nodes of so many workers are lost or come; empty if they can.

    Where each node has whole copies of the model, or a part of one, a worker has the same part of it beside any number
    of others.
    """
    size, inner = _model_size(config), _inner_size(config)
    reasons = {
        "without --elastic": not config.elastic.elastic,
        "with a model that does not take whole nodes": per_node % size > 0
        and (size % per_node or per_node % inner) > 0,
        "without --ckpt-policy": config.snapshot.ckpt_policy is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def nodes_of_model(config: Config, per_node: int) -> int:
    """Nodes of so many workers that a copy of the model takes; 1 if each has whole copies."""
    return max(1, _model_size(config) // per_node)


def copy_by_copy(config: Config, per_node: int, varies: bool) -> bool:
    """Whether ranks are numbered copy by copy of the model, and not stage by stage.

    They are where workers go on in process.  If the number of nodes does not vary (``varies``), ranks stay in the order
    that they have always had, on which the last bits of sums over all workers depend.
    """
    if why_anew(config, per_node):
        return False
    return varies or config.parallel.tensor_model_parallel_size == nodes_of_model(config, per_node) == 1


def stages_on_nodes(config: Config, per_node: int, varies: bool) -> int:
    """Pipeline stages of which a node of so many workers has some, where ranks are numbered copy by copy; else 1."""
    if not copy_by_copy(config, per_node, varies):
        return 1
    return min(config.parallel.pipeline_model_parallel_size, per_node // _inner_size(config))


def global_batch_size(config: Config, world_size: int) -> int:
    """Samples per iteration, over all workers."""
    samples, steps = config.training.global_batch_size, config.zero.gradient_accumulation_steps or 1
    return samples or config.training.micro_batch_size * steps * data_parallel_size(config, world_size)


def num_microbatches(config: Config, world_size: int) -> int:
    """Micro batches per iteration of each replica of the model; with ``--elastic``, of those that have most."""
    per_round = config.training.micro_batch_size * data_parallel_size(config, world_size)
    return -(-global_batch_size(config, world_size) // per_round)


def train_iterations(config: Config, world_size: int) -> int:
    """Iterations to train; with ``--train-samples``, the full batches in these."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    assert config.training.train_samples is not None  # the flags require one of the two
    return config.training.train_samples // global_batch_size(config, world_size)


def layout_sizes(config: Config, world_size: int) -> dict[str, int]:
    """The sizes of a layout, under the names that snapshots use."""
    parallel = config.parallel
    return {
        "world": world_size,
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "ep": parallel.expert_model_parallel_size,
        "expert_tp": parallel.expert_tensor_parallel_size,
        "vpp": config.virtual_pipeline_model_parallel_size or 1,
    }


def check_world(config: Config, world_size: int) -> None:
    """Raises ``ConfigError`` with all reasons why the flags cannot run on this number of workers."""
    problems = Problems()
    for check in (_check_model_grid, _check_expert_grid, _check_slots, _check_batch):
        problems.check(check, config, world_size, problems)
    problems.raise_found()


def check_start(config: Config, workers: Workers) -> None:
    """Raises ``ConfigError`` with all reasons why a job of these workers cannot start or continue."""
    problems, (least, most, per_node) = Problems(), workers
    parts = nodes_of_model(config, per_node) if least < most and not why_anew(config, per_node) else 1
    size = max(most // parts, 1) * parts * per_node
    if problems.check(check_world, config, size):
        problems.check(check_placement, config, size, workers)
        problems.check(_check_planned_faults, config, size)
    if least < most:
        problems.check(check_fewest, config, least, per_node)
    problems.raise_found()


def _check_planned_faults(config: Config, size: int) -> None:
    if config.training.train_iters is None and config.training.train_samples is None:
        return  # another problem reports it
    check_faults(config.faults.planned(size, train_iterations(config, size)), size)


def check_faults(faults: Iterable[Fault], size: int) -> None:
    """Raises ``ConfigError`` if a fault is for a worker that a job of so many does not have."""
    for fault in faults:
        refuse(
            max(fault.ranks, default=0) >= size,
            f"--inject {fault} names a worker that this job does not have. Fix: give a number from 0 to {size - 1}",
            code="fault-without-target",
        )


def check_fewest(config: Config, nodes: int, per_node: int) -> None:
    """Raises ``ConfigError`` if training cannot continue on so few nodes, of so many workers each."""
    problems, left = Problems(), f"--nnodes {nodes}:... continues with {counted(nodes, 'node')}"
    if not why_anew(config, per_node):
        problems.check(_check_fewest_members, config, nodes, per_node, left, problems)
    else:
        try:
            check_world(config, nodes * per_node)
        except ConfigError as error:
            for problem in error.problems:
                problems.refuse(True, f"{left}, where {problem}, or raise MIN", code=problem.code)
    problems.raise_found()


def _check_fewest_members(config: Config, nodes: int, per_node: int, left: str, problems: Problems) -> None:
    """As :func:`check_fewest`, where workers continue in the same processes."""
    elastic, (slots, experts) = config.elastic, _slots_and_experts(config)
    of_model = nodes_of_model(config, per_node)
    if nodes < of_model:
        problems.refuse(
            True,
            f"a copy of the model takes {of_model} nodes, and {left}. Fix: make MIN at least {of_model}",
            code="nodes-too-few",
        )
        return
    of_stage = nodes // of_model  # whole copies, each with a node of the stage
    workers = stage_size(config, of_stage * of_model * per_node)
    problems.refuse(
        slots * workers < experts,
        f"--elastic-slots {slots} leave no room for some of {experts} experts on {counted(workers, 'worker')}, "
        f"and {left}. Fix: make it at least {-(-experts // workers)}, or raise MIN",
        code="slots-too-few",
    )
    problems.refuse(
        elastic.elastic_min_replicas > of_stage,
        f"--elastic-min-replicas {elastic.elastic_min_replicas} is more than {counted(of_stage, 'node')} of each stage "
        f"that can hold an expert, and {left}. Fix: lower it to {of_stage}, or raise MIN",
        code="nodes-too-few",
    )
    problems.check(check_everywhere, config, of_stage, workers // of_stage, f", and {left}")


def check_placement(config: Config, size: int, workers: Workers) -> None:
    """Raises ``ConfigError`` with all reasons why ``--elastic`` cannot place experts on so many workers in all."""
    if not config.elastic.elastic:
        return
    problems, ranks = Problems(), ranks_of_stage(config, size, workers)
    problems.check(check_domains, config, ranks)
    if workers.least == workers.most:  # or check_fewest has found it
        problems.check(check_everywhere, config, stage_size(config, size) // ranks, ranks)
    problems.raise_found()


def check_everywhere(config: Config, nodes: int, ranks: int, left: str = "") -> None:
    """Raises ``ConfigError`` if ``--elastic-everywhere`` leaves too few slots for the other experts.

    Args:
        config: of elastic training.
        nodes: of a pipeline stage.
        ranks: workers of each that are of the stage.
        left: why there may be so few nodes.
    """
    hot, (_, experts) = config.elastic.everywhere, _slots_and_experts(config)
    if not hot:
        return
    most = plan_settings(config, ranks).most_everywhere(nodes, experts)
    refuse(
        hot > most,
        f"--elastic-everywhere {hot} leaves too few of the slots of {counted(nodes, 'node')} for "
        f"--elastic-min-replicas {config.elastic.elastic_min_replicas} of the other experts{left}. Fix: lower it to "
        f"{most}, or add slots or nodes",
        code="slots-too-few",
    )


def plan_settings(config: Config, ranks: int) -> Settings:
    """What elastic training plans for, on nodes with so many workers of a pipeline stage."""
    elastic, (slots, experts) = config.elastic, _slots_and_experts(config)
    return Settings(
        min(slots, experts), elastic.elastic_min_replicas, elastic.everywhere, ranks, elastic.elastic_domain
    )


def check_domains(config: Config, ranks: int) -> None:
    """Raises ``ConfigError`` if nodes with so many workers of a stage make no domain with all experts."""
    settings, (_, experts) = plan_settings(config, ranks), _slots_and_experts(config)
    most, nodes = settings.domain, settings.domain // ranks
    refuse(
        not nodes,
        f"--elastic-domain {most} is less than {counted(ranks, 'worker')} that each node has of a pipeline stage. Fix: "
        f"make it at least {ranks}",
        code="elastic-domain-too-small",
    )
    fit = settings.domains(2 * nodes, experts) == (nodes, nodes)
    refuse(
        not fit,
        f"--elastic-domain {most} leaves no room for some of {experts} experts in a domain of "
        f"{counted(nodes * ranks, 'worker')} "
        f"with --elastic-slots {settings.slots}. Fix: raise one of them",
        code="elastic-domain-too-small",
    )


def _slots_and_experts(config: Config) -> tuple[int, int]:
    """Slots of each worker, and experts, which ``--elastic`` requires."""
    slots, experts = config.elastic.elastic_slots, config.moe.num_experts
    if slots is None or experts is None:
        raise UnknownValueError("elastic_slots")
    return slots, experts


def _model_size(config: Config) -> int:
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def _inner_size(config: Config) -> int:
    """Workers of one stage of a copy of the model."""
    return config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size


def _check_model_grid(config: Config, world_size: int, problems: Problems) -> None:
    parallel, size = config.parallel, _model_size(config)
    problems.refuse(
        world_size % size,
        f"{counted(world_size, 'worker')} cannot be divided into copies of the model: a copy takes "
        f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} times --pipeline-model-parallel-size "
        f"{parallel.pipeline_model_parallel_size}. Fix: start a multiple of {size}, or lower one of them",
        code="workers-not-divisible",
    )


def _check_expert_grid(config: Config, world_size: int, problems: Problems) -> None:
    parallel = config.parallel
    size = (
        parallel.expert_tensor_parallel_size
        * parallel.expert_model_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    problems.refuse(
        size != _model_size(config) and world_size % size,
        f"{counted(world_size, 'worker')} cannot be divided among experts: a copy takes --expert-model-parallel-size "
        f"{parallel.expert_model_parallel_size} times --expert-tensor-parallel-size "
        f"{parallel.expert_tensor_parallel_size} times --pipeline-model-parallel-size "
        f"{parallel.pipeline_model_parallel_size}. Fix: start a multiple of {size}, or lower one of them",
        code="workers-not-divisible",
    )


def _check_slots(config: Config, world_size: int, problems: Problems) -> None:
    elastic, workers = config.elastic, stage_size(config, world_size)
    if not elastic.elastic or world_size % _model_size(config):
        return
    slots, experts = _slots_and_experts(config)
    problems.refuse(
        slots * workers < experts,
        f"--elastic-slots {slots} of {counted(workers, 'worker')} leave no room for some of {experts} "
        f"experts. Fix: make it at least {-(-experts // workers)}, or start more workers",
        code="slots-too-few",
    )
    problems.refuse(
        elastic.elastic_min_replicas > workers,
        f"--elastic-min-replicas {elastic.elastic_min_replicas} is more than {counted(workers, 'worker')} that can "
        "hold an expert. Fix: lower it, or start more workers",
        code="nodes-too-few",
    )


def _check_batch(config: Config, world_size: int, problems: Problems) -> None:
    if world_size % _model_size(config):
        return
    copies, scheduled = data_parallel_size(config, world_size), config.scheduled_batch_sizes
    per_round = config.training.micro_batch_size * copies
    # a run whose batch grows has left the steps without a micro batch for each copy behind, or ends at the first one
    in_force = [size for size in scheduled if size >= per_round] or scheduled[-1:]
    for samples in in_force or [global_batch_size(config, world_size)]:
        named = f"batch {samples} of --step-batch-size-schedule" if scheduled else f"--global-batch-size {samples}"
        _check_size(config, samples, named, copies, problems)
    length, least = config.training, min(scheduled, default=global_batch_size(config, world_size))
    problems.refuse(
        length.train_iters is None and length.train_samples is not None and length.train_samples < least,
        f"--train-samples {config.training.train_samples} do not fill one batch of {least}. Fix: raise it",
        code="samples-too-few",
    )
    steps, wanted = num_microbatches(config, world_size), config.zero.gradient_accumulation_steps
    problems.refuse(
        wanted not in (None, steps) and not scheduled and not global_batch_size(config, world_size) % per_round,
        f"--gradient-accumulation-steps {wanted} contradicts --global-batch-size "
        f"{global_batch_size(config, world_size)}, which is {steps} times {per_round} samples on "
        f"{counted(world_size, 'worker')}. Fix: drop one of them",
        code="batch-not-divisible",
    )


def _check_size(config: Config, samples: int, named: str, copies: int, problems: Problems) -> None:
    """Adds a problem if a global batch cannot be divided among so many copies of the model."""
    per_round, stages = config.training.micro_batch_size * copies, config.parallel.pipeline_model_parallel_size
    problems.refuse(
        config.elastic.elastic and samples < per_round,
        f"{named} has no micro batch for some of {copies} data-parallel copies. Fix: make it at least {per_round}",
        code="batch-not-divisible",
    )
    uneven = problems.refuse(
        samples % per_round and not config.elastic.elastic,
        f"{named} is not a multiple of {per_round}, which is --micro-batch-size {config.training.micro_batch_size} "
        f"times {counted(copies, 'data-parallel copy')}. Fix: make it {max(samples // per_round, 1) * per_round}, for "
        "example",
        code="batch-not-divisible",
    )
    steps = -(-samples // per_round)
    problems.refuse(
        not uneven and config.virtual_pipeline_model_parallel_size and steps % stages,
        f"an interleaved schedule needs a multiple of {stages} micro batches, not {steps}. Fix: make {named} "
        f"a multiple of {per_round * stages}",
        code="batch-not-divisible",
    )


def check_backend(config: Config, backend: str, cuda: bool = False) -> None:
    """Raises ``ConfigError`` if gloo, and the CPU that it implies, does not support the flags; or if there is CUDA."""
    if backend != "gloo":
        return
    problems = Problems()
    problems.refuse(
        cuda,
        "--distributed-backend gloo sends no tensor of a GPU from one worker to another, as pipeline stages and "
        "recovery do. Fix: leave it out, or hide the GPUs with CUDA_VISIBLE_DEVICES=",
        code="gloo-with-gpus",
    )
    moe, parallel = config.moe, config.parallel
    problems.refuse(
        moe.moe_token_dispatcher_type == "alltoall"
        and parallel.expert_tensor_parallel_size > 1
        and parallel.expert_model_parallel_size > 1,
        "on gloo --moe-token-dispatcher-type alltoall cannot combine --expert-tensor-parallel-size and "
        "--expert-model-parallel-size greater than 1. Fix: choose allgather, or --expert-tensor-parallel-size 1",
        code="gloo-unsupported",
    )
    problems.refuse(
        config.network.transformer_impl == "transformer_engine",
        "--transformer-impl transformer_engine needs CUDA. Fix: choose --transformer-impl local",
        code="cuda-needed",
    )
    for needs_cuda, spelling in (
        (moe.moe_grouped_gemm, "--moe-grouped-gemm"),
        (moe.moe_permute_fusion, "--moe-permute-fusion"),
        (moe.moe_token_dispatcher_type == "flex", "--moe-token-dispatcher-type flex"),
    ):
        problems.refuse(needs_cuda, f"{spelling} needs CUDA. Fix: drop it", code="cuda-needed")
    problems.raise_found()
