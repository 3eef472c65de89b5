"""Computes the plans of all pipeline stages from the flags and the connected nodes, and applies them to the model.

Also creates the process groups for token dispatch if a stage has more workers than a domain.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.pretraining.config import Config, nodes_have_rank_blocks, plan_settings, ranks_of_stage, stage_size
from megatron.pretraining.elastic.groups import dispatch_within, exchange_group
from megatron.pretraining.elastic.moe_layer import ElasticLayer
from megatron.pretraining.process.nodes import per_node, stages_on_node, workers_of_job
from moc.elastic.allocation import domain_slices
from moc.elastic.dispatch import even_capacities, level_capacities
from moc.elastic.plan import Loads, Plan, make_plan
from moc.errors import UserError
from moc.files import decode
from moc.files.decode import Count
from moc.sharding.parallel_layout import ParallelLayout

Plans = Mapping[int, Plan]
"""By pipeline stage with experts; ranks are numbered in the stage's exchange group."""

CAPACITIES = {"level": level_capacities, "even": even_capacities}
"""Capacity functions, by the value of ``--elastic-dispatch``."""


class PlansDiffer(UserError, RuntimeError):
    """Workers hold experts by different plans, or optimizer state by different assignments."""

    code = "elastic-plans-differ"


class Nodes(NamedTuple):
    """Nodes of a pipeline stage, over which replicas are spread: a node is lost as a unit.

    Attributes:
        members: numbers of the nodes, in the order of ranks.
        ranks: workers of the stage on each node.
    """

    members: tuple[int, ...]
    ranks: int


NodesOfStages = Mapping[int, Nodes]
"""By pipeline stage; stages have equally many nodes, except partial-model nodes, and nodes equally many workers."""


def first_plans(config: Config, nodes: NodesOfStages) -> Plans:
    """Returns the plans before any load is known."""
    return plans_for(config, nodes, no_loads(config))


def no_loads(config: Config) -> Loads:
    """Returns one token for each expert, by layer with experts."""
    layers = [n for n, has in enumerate(config.moe.expert_layers(config.network.num_layers)) if has]
    return {layer: [1] * (config.moe.num_experts or 0) for layer in layers}


def plans_for(config: Config, nodes: NodesOfStages, loads: Loads, previous: Plans | None = None) -> Plans:
    """Returns the plans of all layers with experts for these loads; pure, so workers agree without communication."""
    network, stages = config.network, config.parallel.pipeline_model_parallel_size
    settings = plan_settings(config, nodes[0].ranks)
    stage_loads: dict[int, dict[int, Sequence[int]]] = defaultdict(dict)
    for layer, tokens in loads.items():
        stage_loads[ParallelLayout(stages, pp=stages).stage_of_layer(layer, network.num_layers)][layer] = tokens
    before = previous or {}
    return {
        stage: make_plan(nodes[stage].members, stage_load, settings, before.get(stage))
        for stage, stage_load in stage_loads.items()
    }


def nodes_of_stages(config: Config, workers: int, partial_model_parts: Sequence[int] = ()) -> NodesOfStages:
    """Returns the nodes of each stage, numbered from 0.

    If one node has all workers of the job, each worker counts as a node.

    Args:
        config: the flags.
        workers: total number of workers.
        partial_model_parts: by partial-model node (the last nodes), its part of the model.
    """
    stages_per_node, training_workers = stages_on_node(config), workers - len(partial_model_parts) * per_node()
    size, ranks = stage_size(config, training_workers), ranks_of_stage(config, training_workers, workers_of_job())
    node_counts = {
        stage: size // ranks + sum(part == stage // stages_per_node for part in partial_model_parts)
        for stage in range(config.parallel.pipeline_model_parallel_size)
    }
    return {stage: Nodes(tuple(range(count)), ranks) for stage, count in node_counts.items()}


def connected_nodes(
    config: Config, reported: Sequence[tuple[int, int]], partial_model_parts: Sequence[int] = ()
) -> NodesOfStages:
    """Returns the connected nodes of each stage.

    Args:
        config: the flags.
        reported: by rank, the rank block of its node (:func:`rank_block`), and its pipeline stage.
        partial_model_parts: as in :func:`nodes_of_stages`.
    """
    nodes = nodes_of_stages(config, len(reported), partial_model_parts)
    if not nodes_have_rank_blocks(config, workers_of_job()):
        return nodes
    members = {
        stage: tuple(dict.fromkeys(block for block, reported_stage in reported if reported_stage == stage))
        for stage in nodes
    }
    return {stage: Nodes(members[stage], stage_nodes.ranks) for stage, stage_nodes in nodes.items()}


def rank_block() -> int:
    """Returns the rank block of this worker's node."""
    return int(os.environ.get("GROUP_RANK", "0"))


def plans_to_json(plans: Plans) -> dict[str, Any]:
    """Returns a dict for ``json.dumps`` and :func:`plans_from_json`."""
    return {str(stage): plan.to_json() for stage, plan in plans.items()}


def plans_from_json(data: Mapping[str, Any]) -> Plans:
    """Returns the plans of :func:`plans_to_json`; raises ValueError if a plan is invalid or lacks an expert."""
    plans = {stage: Plan.from_json(plan) for stage, plan in decode.convert(data, dict[Count, dict[str, Any]]).items()}
    if incomplete := [stage for stage, plan in plans.items() if not plan.is_complete]:
        raise ValueError(f"the plan of stage {incomplete[0]} lacks an expert")
    return plans


def fit(plans: Plans, other_plans: Plans) -> bool:
    """Returns whether two sets of plans have the same workers, domains, layers and slots."""
    return plans.keys() == other_plans.keys() and all(
        (own.members, own.ranks, own.domains, own.experts, _shapes(own))
        == (other.members, other.ranks, other.domains, other.experts, _shapes(other))
        for own, other in ((plans[stage], other_plans[stage]) for stage in plans)
    )


def _shapes(plan: Plan) -> dict[int, tuple[int, ...]]:
    return {layer: table.shape for layer, table in plan.tables.items()}


def assign_experts(layers: Iterable[ElasticLayer], plan: Plan, dispatch: str) -> None:
    """Assigns the experts of the stage's plan to this worker's slots; their state does not move."""
    rank = dist.get_rank(exchange_group())
    domain = plan.domain_of(rank)
    for layer in layers:
        assigned = plan.experts_of(layer.layer, rank)
        slots = slots_after(layer.experts.slots or (None,) * layer.experts.num_local_experts, assigned)
        layer.assign(slots, plan.replica_matrix(layer.layer), domain, CAPACITIES[dispatch])


def slots_after(previous: Sequence[int | None], assigned: Collection[int]) -> tuple[int | None, ...]:
    """Returns the experts by slot: remaining ones keep their slots, new ones fill the free slots in ascending order."""
    new = iter(sorted(set(assigned) - set(previous)))
    return tuple(expert if expert in assigned else next(new, None) for expert in previous)


def build_domains(config: Config, max_workers: int) -> None:
    """Creates the group of each domain, on all ranks, after megatron-core's groups and numbered like them.

    A continuing worker needs equally many groups in each generation. So it has a domain group even if the few remaining
    nodes form one domain.

    Args:
        config: the flags.
        max_workers: workers of the job if all nodes are connected.
    """
    dispatch_within(None)
    parallel, world = config.parallel, dist.get_world_size()
    if not config.elastic.elastic or len(_ranks_of_domains(config, max_workers, stage_size(config, max_workers))) == 1:
        return
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    ranks = parallel_state.RankGenerator(tp=tp, ep=1, dp=world // (tp * pp * cp), pp=pp, cp=cp, order="tp-cp-ep-dp-pp")
    for stage in ranks.get_ranks("tp-dp-cp"):
        for domain in domain_slices(_ranks_of_domains(config, world, len(stage))):
            members = sorted(stage)[domain]
            group: Any = dist.new_group(members, group_desc="ELASTIC_DOMAIN")
            if dist.get_rank() in members:
                dispatch_within(group)


def _ranks_of_domains(config: Config, workers: int, size: int) -> list[int]:
    """Returns the ranks of each domain of a stage of ``size`` workers, as in its plan; ``workers`` are all."""
    ranks = nodes_of_stages(config, workers)[0].ranks
    domains = plan_settings(config, ranks).domain_sizes(size // ranks, config.moe.num_experts or 0)
    return [size_in_nodes * ranks for size_in_nodes in domains]
