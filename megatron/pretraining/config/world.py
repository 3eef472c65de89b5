"""Computes values and checks that depend on the number of workers and on the machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron.pretraining.config.flag import ConfigError, Problems, UnknownValueError, dashed, refuse
from megatron.pretraining.config.groups import Config
from moc.cli_output import counted
from moc.elastic.allocation import PlanSettings
from moc.recovery.copy_placement import validate_replicas
from moc.runtime.fault_injection import Fault


class Workers(NamedTuple):
    """Workers of a job.

    Attributes:
        min_nodes: nodes with which training continues after the loss of others.
        max_nodes: nodes of the job.
        per_node: workers of each node.
    """

    min_nodes: int
    max_nodes: int
    per_node: int


def data_parallel_size(config: Config, world_size: int) -> int:
    """Returns the number of model replicas that read different samples."""
    return world_size // _model_size(config)


def stage_size(config: Config, world_size: int) -> int:
    """Returns the workers of a pipeline stage; with ``--elastic``, they can hold the experts of its layers."""
    return world_size // config.parallel.pipeline_model_parallel_size


def ranks_of_stage(config: Config, size: int, workers: Workers) -> int:
    """Returns the workers of each node in one pipeline stage, in a job of ``size`` workers.

    If the job has only one node, each worker counts as a node.
    """
    varies = workers.min_nodes < workers.max_nodes
    stage_ranks_per_node, stage_ranks = (
        workers.per_node // stages_on_nodes(config, workers.per_node, varies),
        stage_size(config, size),
    )
    uses_nodes = stage_ranks > stage_ranks_per_node or nodes_have_rank_blocks(config, workers)
    return stage_ranks_per_node if uses_nodes and not stage_ranks % stage_ranks_per_node else 1


def nodes_have_rank_blocks(config: Config, workers: Workers) -> bool:
    """Returns whether nodes are identified by rank blocks: several nodes, each with equal stages of all its copies."""
    by_copies = copy_by_copy(config, workers.per_node, workers.min_nodes < workers.max_nodes)
    return workers.max_nodes > 1 and (by_copies or config.parallel.pipeline_model_parallel_size == 1)


def restart_reason(config: Config, per_node: int) -> str:
    """Returns why a change of nodes restarts the workers instead of continuing in process; empty if it does not.

    If each node holds complete model copies or a part of one, a worker keeps its part at any number of nodes.
    """
    size, inner = _model_size(config), _inner_size(config)
    reasons = {
        "without --elastic": not config.elastic.elastic,
        "with a model that does not fill complete nodes": per_node % size > 0
        and (size % per_node or per_node % inner) > 0,
        "without --ckpt-policy": config.snapshot.ckpt_policy is None,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def nodes_of_model(config: Config, per_node: int) -> int:
    """Returns the nodes that a copy of the model takes; 1 if each node has complete copies."""
    return max(1, _model_size(config) // per_node)


def copy_by_copy(config: Config, per_node: int, varies: bool) -> bool:
    """Returns whether ranks are numbered by model copy instead of by stage.

    They are if workers continue in process.  With a fixed number of nodes (not ``varies``), ranks keep their original
    order, which determines the last bits of sums over all workers.
    """
    if restart_reason(config, per_node):
        return False
    return varies or config.parallel.tensor_model_parallel_size == nodes_of_model(config, per_node) == 1


def stages_on_nodes(config: Config, per_node: int, varies: bool) -> int:
    """Returns the pipeline stages of a node if ranks are numbered by model copy, otherwise 1."""
    if not copy_by_copy(config, per_node, varies):
        return 1
    return min(config.parallel.pipeline_model_parallel_size, per_node // _inner_size(config))


def global_batch_size(config: Config, world_size: int) -> int:
    """Returns the samples per iteration, over all workers."""
    samples, steps = config.training.global_batch_size, config.zero.gradient_accumulation_steps or 1
    return samples or config.training.micro_batch_size * steps * data_parallel_size(config, world_size)


def num_microbatches(config: Config, world_size: int) -> int:
    """Returns the micro batches per iteration of each model replica; with ``--elastic``, the maximum."""
    per_round = config.training.micro_batch_size * data_parallel_size(config, world_size)
    return -(-global_batch_size(config, world_size) // per_round)


def train_iterations(config: Config, world_size: int) -> int:
    """Returns the iterations to train; with ``--train-samples``, the full batches in these samples."""
    if config.training.train_iters is not None:
        return config.training.train_iters
    assert config.training.train_samples is not None  # the flags require one of the two
    return config.training.train_samples // global_batch_size(config, world_size)


def train_samples(config: Config, world_size: int) -> int:
    """Returns the samples to train that Megatron-LM prepares; with a batch schedule, ``--train-samples`` if given."""
    samples = config.training.train_samples
    if samples is not None and config.scheduled_batch_sizes:
        return samples
    return train_iterations(config, world_size) * global_batch_size(config, world_size)


def layout_sizes(config: Config, world_size: int) -> dict[str, int]:
    """Returns the sizes of a layout, under the names that snapshots use."""
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


def check_job(config: Config, workers: Workers) -> None:
    """Raises ``ConfigError`` with all reasons why a job of these workers cannot run.

    Args:
        config: the flags, whose values that Megatron-LM derives may be missing, except sizes of batches.
        workers: workers of the job.
    """
    problems, snapshot = Problems(), config.snapshot
    problems.check(check_start, config, workers)
    if snapshot.ckpt_policy and snapshot.ckpt_tier == "peers":
        fewest = workers.min_nodes if workers.min_nodes < workers.max_nodes else None
        problems.check(validate_replicas, snapshot.replicas, workers.max_nodes, fewest)
    problems.raise_found()


def check_start(config: Config, workers: Workers) -> None:
    """Raises ``ConfigError`` with all reasons why a job of these workers cannot start or continue."""
    problems, (min_nodes, max_nodes, per_node) = Problems(), workers
    parts = nodes_of_model(config, per_node) if min_nodes < max_nodes and not restart_reason(config, per_node) else 1
    size = max(max_nodes // parts, 1) * parts * per_node
    if problems.check(check_world, config, size):
        problems.check(check_placement, config, size, workers)
        problems.check(_check_planned_faults, config, size)
    if min_nodes < max_nodes:
        problems.check(check_fewest, config, min_nodes, per_node)
    problems.raise_found()


def _check_planned_faults(config: Config, size: int) -> None:
    if config.training.train_iters is None and config.training.train_samples is None:
        return  # another problem reports it
    check_faults(config.faults.planned(size, train_iterations(config, size)), size)


def check_faults(faults: Iterable[Fault], size: int) -> None:
    """Raises ``ConfigError`` if a fault targets a worker outside a job of ``size`` workers."""
    for fault in faults:
        refuse(
            max(fault.ranks, default=0) >= size,
            f"--inject {fault} names a worker that this job does not have. Fix: give a number from 0 to {size - 1}",
            code="fault-without-target",
        )


def check_fewest(config: Config, nodes: int, per_node: int) -> None:
    """Raises ``ConfigError`` if training cannot continue on ``nodes`` nodes of ``per_node`` workers."""
    problems, context = Problems(), f"--nnodes {nodes}:... continues with {counted(nodes, 'node')}"
    if not restart_reason(config, per_node):
        problems.check(_check_fewest_members, config, nodes, per_node, context, problems)
    else:
        try:
            check_world(config, nodes * per_node)
        except ConfigError as error:
            for problem in error.problems:
                problems.refuse(True, f"{context}, where {problem}, or raise MIN", code=problem.code)
    problems.raise_found()


def _check_fewest_members(config: Config, nodes: int, per_node: int, context: str, problems: Problems) -> None:
    """Checks as :func:`check_fewest`, for workers that continue in the same processes."""
    elastic, (slots, experts) = config.elastic, _slots_and_experts(config)
    model_nodes = nodes_of_model(config, per_node)
    if nodes < model_nodes:
        problems.refuse(
            True,
            f"a copy of the model takes {model_nodes} nodes, and {context}. Fix: make MIN at least {model_nodes}",
            code="nodes-too-few",
        )
        return
    copies = nodes // model_nodes  # complete copies, each with a node of the stage
    workers = stage_size(config, copies * model_nodes * per_node)
    problems.refuse(
        slots * workers < experts,
        f"--elastic-slots {slots} leave no room for some of {experts} experts on {counted(workers, 'worker')}, "
        f"and {context}. Fix: make it at least {-(-experts // workers)}, or raise MIN",
        code="slots-too-few",
    )
    problems.refuse(
        elastic.elastic_min_replicas > copies,
        f"--elastic-min-replicas {elastic.elastic_min_replicas} is more than {counted(copies, 'node')} of each stage "
        f"that can hold an expert, and {context}. Fix: lower it to {copies}, or raise MIN",
        code="nodes-too-few",
    )
    problems.check(check_everywhere, config, copies, workers // copies, f", and {context}")


def check_placement(config: Config, size: int, workers: Workers) -> None:
    """Raises ``ConfigError`` with all reasons why ``--elastic`` cannot place experts on ``size`` workers."""
    if not config.elastic.elastic:
        return
    problems, ranks = Problems(), ranks_of_stage(config, size, workers)
    problems.check(check_domains, config, ranks)
    if workers.min_nodes == workers.max_nodes:  # otherwise check_fewest has reported it
        problems.check(check_everywhere, config, stage_size(config, size) // ranks, ranks)
    problems.raise_found()


def check_everywhere(config: Config, nodes: int, ranks: int, context: str = "") -> None:
    """Raises ``ConfigError`` if ``--elastic-everywhere`` leaves too few slots for the other experts.

    Args:
        config: configuration of elastic training.
        nodes: nodes of a pipeline stage.
        ranks: workers of the stage on each node.
        context: reason for so few nodes.
    """
    hottest, (_, experts) = config.elastic.everywhere, _slots_and_experts(config)
    if not hottest:
        return
    maximum = plan_settings(config, ranks).max_everywhere(nodes, experts)
    refuse(
        hottest > maximum,
        f"--elastic-everywhere {hottest} leaves too few of the slots of {counted(nodes, 'node')} for "
        f"--elastic-min-replicas {config.elastic.elastic_min_replicas} of the other experts{context}. Fix: lower it to "
        f"{maximum}, or add slots or nodes",
        code="slots-too-few",
    )


def plan_settings(config: Config, ranks: int) -> PlanSettings:
    """Returns the settings of the placement, on nodes with ``ranks`` workers of a pipeline stage."""
    elastic, (slots, experts), hours = config.elastic, _slots_and_experts(config), config.snapshot.mtbf_hours
    mtbf = {} if hours is None else {"mtbf_s": 3600.0 * hours}
    return PlanSettings(
        slots=min(slots, experts),
        min_replicas=elastic.elastic_min_replicas,
        everywhere=elastic.everywhere,
        ranks=ranks,
        max_domain_ranks=elastic.elastic_domain,
        **mtbf,
    )


def check_domains(config: Config, ranks: int) -> None:
    """Raises ``ConfigError`` if nodes with ``ranks`` workers of a stage cannot form a domain with all experts."""
    settings, (_, experts) = plan_settings(config, ranks), _slots_and_experts(config)
    domain_ranks, nodes = settings.max_domain_ranks, settings.max_domain_ranks // ranks
    refuse(
        not nodes,
        f"--elastic-domain {domain_ranks} is less than {counted(ranks, 'worker')} that each node has of a pipeline "
        f"stage. Fix: make it at least {ranks}",
        code="elastic-domain-too-small",
    )
    fits = settings.domain_sizes(2 * nodes, experts) == (nodes, nodes)
    refuse(
        not fits,
        f"--elastic-domain {domain_ranks} leaves no room for some of {experts} experts in a domain of "
        f"{counted(nodes * ranks, 'worker')} "
        f"with --elastic-slots {settings.slots}. Fix: raise one of them",
        code="elastic-domain-too-small",
    )


def _slots_and_experts(config: Config) -> tuple[int, int]:
    """Returns the slots of each worker and the number of experts, which ``--elastic`` requires."""
    slots, experts = config.elastic.elastic_slots, config.moe.num_experts
    if slots is None or experts is None:
        raise UnknownValueError("elastic_slots")
    return slots, experts


def _model_size(config: Config) -> int:
    parallel = config.parallel
    return parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size


def _inner_size(config: Config) -> int:
    """Returns the workers of one stage of a model copy."""
    return config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size


def _check_model_grid(config: Config, world_size: int, problems: Problems) -> None:
    size = _model_size(config)
    problems.refuse(
        world_size % size,
        f"{counted(world_size, 'worker')} cannot be divided into copies of the model: a copy takes "
        f"{_product(config, 'tensor_model', 'pipeline_model', 'context')}. Fix: start a multiple of {size}, or lower "
        "it",
        code="workers-not-divisible",
    )


def _product(config: Config, *kinds: str) -> str:
    """Returns the flags of parallelism that are greater than 1, as a product."""
    sizes = {f"{kind}_parallel_size": getattr(config.parallel, f"{kind}_parallel_size") for kind in kinds}
    return " times ".join(f"{dashed(name)} {size}" for name, size in sizes.items() if size > 1)


def _check_expert_grid(config: Config, world_size: int, problems: Problems) -> None:
    parallel = config.parallel
    size = (
        parallel.expert_tensor_parallel_size
        * parallel.expert_model_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    problems.refuse(
        size != _model_size(config) and world_size % size,
        f"{counted(world_size, 'worker')} cannot be divided among experts: a copy takes "
        f"{_product(config, 'expert_model', 'expert_tensor', 'pipeline_model')}. Fix: start a multiple of {size}, or "
        "lower it",
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
    # a growing batch has passed the steps without a micro batch for each copy, or the run ends at the first
    sizes = [size for size in scheduled if size >= per_round] or scheduled[-1:]
    for samples in sizes or [global_batch_size(config, world_size)]:
        named = f"batch {samples} of --step-batch-size-schedule" if scheduled else f"--global-batch-size {samples}"
        _check_size(config, samples, named, copies, problems)
    training, smallest_batch = config.training, min(scheduled, default=global_batch_size(config, world_size))
    problems.refuse(
        training.train_iters is None and training.train_samples is not None and training.train_samples < smallest_batch,
        f"--train-samples {config.training.train_samples} do not fill one batch of {smallest_batch}. Fix: raise it",
        code="samples-too-few",
    )
    steps, accumulation_steps = num_microbatches(config, world_size), config.zero.gradient_accumulation_steps
    problems.refuse(
        accumulation_steps not in (None, steps)
        and not scheduled
        and not global_batch_size(config, world_size) % per_round,
        f"--gradient-accumulation-steps {accumulation_steps} contradicts --global-batch-size "
        f"{global_batch_size(config, world_size)}, which is {steps} times {per_round} samples on "
        f"{counted(world_size, 'worker')}. Fix: drop one of them",
        code="batch-not-divisible",
    )


def _check_size(config: Config, samples: int, named: str, copies: int, problems: Problems) -> None:
    """Adds a problem if a global batch cannot be divided among ``copies`` model copies."""
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
    """Raises ``ConfigError`` for flags that gloo, which implies the CPU, does not support, or if there is CUDA."""
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
    gathers_tokens = moe.moe_token_dispatcher_type == "alltoall" and parallel.expert_tensor_parallel_size > 1
    for is_uneven, spelling in (  # gloo gathers only equally many from each rank
        (parallel.expert_model_parallel_size > 1, "--expert-model-parallel-size greater than 1"),
        (moe.drops_tokens, "--moe-expert-capacity-factor without --moe-pad-expert-input-to-capacity"),
    ):
        problems.refuse(
            gathers_tokens and is_uneven,
            "on gloo --moe-token-dispatcher-type alltoall cannot combine --expert-tensor-parallel-size greater than 1 "
            f"and {spelling}. Fix: choose allgather, or --expert-tensor-parallel-size 1",
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
