"""Brings a plan of replicas into the model: which slot holds which expert, and which replica computes which tokens."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from megatron.pretraining.config import Config, stage_size
from megatron.pretraining.elastic.groups import exchange_group
from megatron.pretraining.elastic.layer import ElasticLayer
from moc.elastic.dispatch import even, level
from moc.elastic.plan import Loads, Plan, Settings, plan
from moc.sharding.layout import Layout

Plans = Mapping[int, Plan]
"""By pipeline stage, of those with experts; ranks are those of the stage's exchange group."""

CAPACITIES = {"level": level, "even": even}
"""By the value of ``--elastic-dispatch``."""


def first_plans(config: Config, workers: int) -> Plans:
    """The plans before any load is known."""
    layers = [n for n, has in enumerate(config.moe.expert_layers(config.network.num_layers)) if has]
    return plans_for(config, workers, {layer: [1] * (config.moe.num_experts or 0) for layer in layers})


def plans_for(config: Config, workers: int, loads: Loads, previous: Plans | None = None) -> Plans:
    """The plans for these loads, of all layers with experts; pure, so that all workers agree without asking."""
    elastic, network, stages = config.elastic, config.network, config.parallel.pipeline_model_parallel_size
    size, experts = stage_size(config, workers), config.moe.num_experts
    assert elastic.elastic_slots is not None and experts is not None  # --elastic requires both
    nodes, ranks = nodes_of(size)
    slots = min(elastic.elastic_slots, experts)
    settings = Settings(slots, elastic.elastic_min_replicas, elastic.everywhere, ranks)
    of_stage: dict[int, dict[int, Sequence[int]]] = defaultdict(dict)
    for layer, tokens in loads.items():
        of_stage[Layout(stages, pp=stages).stage_of_layer(layer, network.num_layers)][layer] = tokens
    before = previous or {}
    return {stage: plan(range(nodes), of, settings, before.get(stage)) for stage, of in of_stage.items()}


def nodes_of(size: int) -> tuple[int, int]:
    """The nodes of a stage with so many workers, and the workers of each.

    Replicas are spread over nodes, which are lost as a whole.  Where one node has all workers, each counts as one.
    """
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (size // here, here) if size > here and not size % here else (size, 1)


def plans_to_json(plans: Plans) -> dict[str, Any]:
    """For :func:`plans_from_json`, by ``json.dumps``."""
    return {str(stage): plan.to_json() for stage, plan in plans.items()}


def plans_from_json(told: Mapping[str, Any]) -> Plans:
    """The inverse of :func:`plans_to_json`; raises ValueError for what is no plan."""
    return {int(stage): Plan.from_json(one) for stage, one in told.items()}


def fit(plans: Plans, others: Plans) -> bool:
    """Whether plans are for the same workers, layers and slots as others."""
    return plans.keys() == others.keys() and all(
        (mine.members, mine.ranks, mine.experts, _shapes(mine)) == (its.members, its.ranks, its.experts, _shapes(its))
        for mine, its in ((plans[stage], others[stage]) for stage in plans)
    )


def _shapes(of: Plan) -> dict[int, tuple[int, ...]]:
    return {layer: table.shape for layer, table in of.tables.items()}


def adopt(layers: Iterable[ElasticLayer], of: Plan, dispatch: str) -> None:
    """Lets the slots of this worker hold what the plan of its stage says; the state in them does not move."""
    rank = dist.get_rank(exchange_group())
    for layer in layers:
        held = of.experts_of(layer.layer, rank)
        slots = slots_after(layer.experts.slots or (None,) * layer.experts.num_local_experts, held)
        layer.hold(slots, of.held(layer.layer), CAPACITIES[dispatch])


def slots_after(before: Sequence[int | None], held: Collection[int]) -> tuple[int | None, ...]:
    """The experts by slot: those that stay keep their slots, new ones get the free slots, in ascending order."""
    new = iter(sorted(set(held) - set(before)))
    return tuple(expert if expert in held else next(new, None) for expert in before)
