"""Brings a plan of replicas into the model: which slot holds which expert, and which replica computes which tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy
import torch.distributed as dist

from megatron.pretraining.config import Config, stage_size
from megatron.pretraining.elastic.groups import exchange_group
from megatron.pretraining.elastic.layer import ElasticLayer
from moc.elastic.allocation import allocate_distinct, least_replicas
from moc.elastic.dispatch import even, level
from moc.elastic.placement import holders, place

Table = tuple[tuple[int, ...], ...]
"""By expert of a layer and rank of its stage's exchange group, replicas: more than one are a weight of the dispatcher."""
Plan = Mapping[int, Table]
"""By layer, from 0."""

CAPACITIES = {"level": level, "even": even}
"""By the value of ``--elastic-dispatch``."""


def first_plan(config: Config, workers: int) -> Plan:
    """The plan before any load is known."""
    layers = [n for n, has in enumerate(config.moe.expert_layers(config.network.num_layers)) if has]
    return plan_for(config, workers, {layer: [1] * (config.moe.num_experts or 0) for layer in layers})


def plan_for(config: Config, workers: int, loads: Mapping[int, Sequence[int]]) -> Plan:
    """The plan for these loads, by layer and expert; pure, so that all workers agree without asking."""
    elastic, experts, size = config.elastic, config.moe.num_experts, stage_size(config, workers)
    assert elastic.elastic_slots is not None and experts is not None  # --elastic requires both
    slots = min(elastic.elastic_slots, experts)
    least = least_replicas(elastic.elastic_min_replicas, experts, size, slots)
    everywhere = elastic.everywhere or 0
    plan = {}
    for layer, tokens in loads.items():
        counts = allocate_distinct(tokens, size, slots, least, everywhere)
        table = holders(place(counts, size, slots, everywhere), experts)
        plan[layer] = tuple(map(tuple, table.tolist()))
    return plan


def adopt(layers: Iterable[ElasticLayer], plan: Plan, dispatch: str) -> None:
    """Lets the slots of this worker hold what the plan says; the state in them does not move."""
    rank = dist.get_rank(exchange_group())
    for layer in layers:
        table = numpy.array(plan[layer.layer], dtype=numpy.int64)
        held = numpy.flatnonzero(table[:, rank]).tolist()
        slots = slots_after(layer.experts.slots or (None,) * layer.experts.num_local_experts, held)
        layer.hold(slots, table, CAPACITIES[dispatch])


def slots_after(before: Sequence[int | None], held: Collection[int]) -> tuple[int | None, ...]:
    """The experts by slot: those that stay keep their slots, new ones get the free slots, in ascending order."""
    new = iter(sorted(set(held) - set(before)))
    return tuple(expert if expert in held else next(new, None) for expert in before)


def ranks_of(row: Sequence[int]) -> list[int]:
    """The ranks that hold an expert, from its row of a :data:`Table`."""
    return [rank for rank, replicas in enumerate(row) if replicas]
