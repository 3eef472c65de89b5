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
    of_stage: dict[int, dict[int, Sequence[int]]] = defaultdict(dict)
    for layer, tokens in loads.items():
        of_stage[ParallelLayout(stages, pp=stages).stage_of_layer(layer, network.num_layers)][layer] = tokens
    before = previous or {}
    return {stage: make_plan(nodes[stage].members, of, settings, before.get(stage)) for stage, of in of_stage.items()}


def nodes_of_stages(config: Config, workers: int, helpers: Sequence[int] = ()) -> NodesOfStages:
    """Returns the nodes of each stage, numbered from 0.

    If one node has all workers of the job, each worker counts as a node.

    Args:
        config: the flags.
        workers: total number of workers.
        helpers: by partial-model node (the last nodes), its part of the model.
    """
    of_node, trains = stages_on_node(config), workers - len(helpers) * per_node()
    size, ranks = stage_size(config, trains), ranks_of_stage(config, trains, workers_of_job())
    counts = {
        stage: size // ranks + sum(part == stage // of_node for part in helpers)
        for stage in range(config.parallel.pipeline_model_parallel_size)
    }
    return {stage: Nodes(tuple(range(count)), ranks) for stage, count in counts.items()}


def nodes_there(config: Config, told: Sequence[tuple[int, int]], helpers: Sequence[int] = ()) -> NodesOfStages:
    """Returns the connected nodes of each stage.

    Args:
        config: the flags.
        told: by rank, the rank block of its node (:func:`place`), and its pipeline stage.
        helpers: as in :func:`nodes_of_stages`.
    """
    nodes = nodes_of_stages(config, len(told), helpers)
    if not nodes_have_rank_blocks(config, workers_of_job()):
        return nodes
    members = {stage: tuple(dict.fromkeys(place for place, its in told if its == stage)) for stage in nodes}
    return {stage: Nodes(members[stage], of.ranks) for stage, of in nodes.items()}


def place() -> int:
    """Returns the rank block of this worker's node."""
    return int(os.environ.get("GROUP_RANK", "0"))


def plans_to_json(plans: Plans) -> dict[str, Any]:
    """Returns a dict for ``json.dumps`` and :func:`plans_from_json`."""
    return {str(stage): plan.to_json() for stage, plan in plans.items()}


def plans_from_json(told: Mapping[str, Any]) -> Plans:
    """Returns the plans of :func:`plans_to_json`; raises ValueError if a plan is invalid or lacks an expert."""
    plans = {stage: Plan.from_json(one) for stage, one in decode.convert(told, dict[Count, dict[str, Any]]).items()}
    if lacking := [stage for stage, one in plans.items() if not one.is_complete]:
        raise ValueError(f"the plan of stage {lacking[0]} lacks an expert")
    return plans


def fit(plans: Plans, others: Plans) -> bool:
    """Returns whether two sets of plans have the same workers, domains, layers and slots."""
    return plans.keys() == others.keys() and all(
        (mine.members, mine.ranks, mine.domains, mine.experts, _shapes(mine))
        == (its.members, its.ranks, its.domains, its.experts, _shapes(its))
        for mine, its in ((plans[stage], others[stage]) for stage in plans)
    )


def _shapes(of: Plan) -> dict[int, tuple[int, ...]]:
    return {layer: table.shape for layer, table in of.tables.items()}


def adopt(layers: Iterable[ElasticLayer], of: Plan, dispatch: str) -> None:
    """Assigns the experts of the stage's plan to this worker's slots; their state does not move."""
    rank = dist.get_rank(exchange_group())
    domain = of.domain_of(rank)
    for layer in layers:
        held = of.experts_of(layer.layer, rank)
        slots = slots_after(layer.experts.slots or (None,) * layer.experts.num_local_experts, held)
        layer.hold(slots, of.replica_matrix(layer.layer), domain, CAPACITIES[dispatch])


def slots_after(before: Sequence[int | None], held: Collection[int]) -> tuple[int | None, ...]:
    """Returns the experts by slot: remaining ones keep their slots, new ones fill the free slots in ascending order."""
    new = iter(sorted(set(held) - set(before)))
    return tuple(expert if expert in held else next(new, None) for expert in before)


def build_domains(config: Config, most: int) -> None:
    """Creates the group of each domain, on all ranks, after megatron-core's groups and numbered like them.

    A continuing worker needs equally many groups in each generation. So it has a domain group even if the few remaining
    nodes form one domain.

    Args:
        config: the flags.
        most: workers of the job if all nodes are connected.
    """
    dispatch_within(None)
    parallel, world = config.parallel, dist.get_world_size()
    if not config.elastic.elastic or len(_ranks_of_domains(config, most, stage_size(config, most))) == 1:
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
    return [of * ranks for of in domains]
