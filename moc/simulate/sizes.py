"""Computes the bytes that ranks save, by training's sharding rules and rotation of experts."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moc.policy.costs import SnapshotSizes
from moc.policy.pec_selection import sequential_experts
from moc.policy.windows import order_operators
from moc.sharding import (
    SCHEMES,
    ParallelLayout,
    SaveItem,
    StateBytes,
    assign_items,
    cut_large_items,
    list_save_items,
)
from moc.simulate.cost import split_stages
from moc.state.operators import Detail, Operator

MIXED = StateBytes()
"""16-bit compute weights, fp32 master weights and Adam's moments: 2 + 4 + 8 bytes."""

_REPLICAS = 32  # replicas of an expert-parallel group simulated individually; larger layouts are scaled down


@dataclass(frozen=True)
class OperatorSize:
    """Bytes of an operator on one rank: of master weights and moments, and of the compute weights."""

    name: str
    full: float
    compute: float


def full_sizes(operators: Sequence[Operator], layout: ParallelLayout, state: StateBytes = MIXED) -> SnapshotSizes:
    """Returns the sizes of a full snapshot: master weights and moments, which determine compute weights.

    The stages of the layout need not divide the layers of the unpartitioned model.

    Raises:
        ValueError: layers or experts cannot be distributed over the ranks.
    """
    return _sizes(operators, layout, state, None)


def pec_sizes(
    operators: Sequence[Operator], layout: ParallelLayout, k: int, state: StateBytes = MIXED
) -> SnapshotSizes:
    """Returns the sizes of a snapshot with K experts of each layer (MoC, section 3.2); see :func:`full_sizes`."""
    layers = sorted({o.expert_id[0] for o in operators if o.expert_id is not None})
    experts = 1 + max((o.expert for o in operators if o.expert is not None), default=-1)
    chosen = {
        f"layers.{layer}.expert.{expert}"
        for position, layer in enumerate(layers)
        for expert in sequential_experts(0, position, k, experts, layout.ep)
    }
    return _sizes(operators, layout, state, chosen)


def busiest_operator_bytes(
    operators: Sequence[Operator], layout: ParallelLayout, state: StateBytes = MIXED
) -> list[OperatorSize]:
    """Returns the operators of the busiest rank, with its share of each, in the order of a sparse window."""
    parts = (dataclasses.replace(state, weights=0), dataclasses.replace(state, master=0, moments=0))
    busiest: list[OperatorSize] = []
    for stage, _ in _distinct_stages(operators, layout):
        stage_layout, fewer = _stage_layout(layout)
        full, compute = (_shares(stage, stage_layout, part) for part in parts)
        rank = max(full, key=lambda r: sum(full[r].values()))
        ordered = (o.name for o in order_operators(stage, None, layout.ep))
        rank_sizes = [OperatorSize(name, full[rank][name] / fewer, compute[rank][name] / fewer) for name in ordered]
        rank_sizes = [size for size in rank_sizes if size.full or size.compute]
        busiest = max(busiest, rank_sizes, key=lambda sizes: sum(size.full for size in sizes))
    return busiest


class SizesByRules:
    """Sizes as :class:`moc.policy.interface.SnapshotSizer`, of a model that is not loaded; in full, or gradients.

    Args:
        operators: operators of the unpartitioned model.
        layout: the parallel layout.
        state: bytes of each parameter.
        nodes: node of each rank.
        replicas: other nodes that keep a copy of each node's snapshots; 0 without peers.
        zero: optimizer state is partitioned over data-parallel ranks.

    Raises:
        ValueError: layers or experts cannot be distributed over the ranks.
    """

    def __init__(
        self,
        operators: Sequence[Operator],
        layout: ParallelLayout,
        state: StateBytes = MIXED,
        nodes: tuple[int, ...] = (),
        replicas: int = 0,
        zero: bool = True,
    ):
        self.nodes, self.replicas = nodes, replicas
        self._items: dict[tuple[str, bool], list[SaveItem]] = defaultdict(list)
        gradients = dataclasses.replace(_saved(state), moments=0)  # the size of fp32 weights
        for gradient, state_bytes in enumerate((_saved(state), gradients)):
            for item in list_save_items(operators, layout, state_bytes, uses_zero=zero):
                self._items[item.operator, bool(gradient)].append(item)

    def __call__(self, operators: Mapping[str, Detail]) -> int:
        """Returns the bytes of the rank that saves the most of operators."""
        return max(self._loads(operators).values(), default=0)

    def by_rank(self, plans: Mapping[str, Mapping[str, Detail]]) -> dict[str, dict[int, int]]:
        """Returns the bytes of each rank by plan, without ranks that save nothing."""
        return {name: self._loads(plan) for name, plan in plans.items()}

    def _loads(self, operators: Mapping[str, Detail]) -> dict[int, int]:
        details = ((name, detail is Detail.GRAD) for name, detail in operators.items())
        items = cut_large_items([item for detail in details for item in self._items[detail]])
        bytes_by_rank: Counter[int] = Counter()
        for item, rank in zip(items, assign_items(items, SCHEMES["EE+AN"]), strict=True):
            bytes_by_rank[rank] += item.nbytes
        return dict(bytes_by_rank)


def _saved(state: StateBytes) -> StateBytes:
    """Returns the bytes of a full snapshot: without compute weights, which follow from master weights."""
    return dataclasses.replace(state, weights=0) if state.master else state


def _sizes(
    operators: Sequence[Operator], layout: ParallelLayout, state: StateBytes, chosen: Collection[str] | None
) -> SnapshotSizes:
    state, busiest, total = _saved(state), 0, 0
    for stage, times in _distinct_stages(operators, layout):
        stage_layout, fewer = _stage_layout(layout)
        loads = [sum(share.values()) for share in _shares(stage, stage_layout, state, chosen).values()]
        busiest, total = max(busiest, math.ceil(max(loads) / fewer)), total + times * sum(loads)
    return SnapshotSizes(busiest, total)


def _stage_layout(layout: ParallelLayout) -> tuple[ParallelLayout, int]:
    """Returns the layout of one stage with a manageable number of replicas, and their reduction factor."""
    fewer = max((d for d in range(1, layout.expert_dp + 1) if _divides(layout, d)), default=1)
    world = layout.world // layout.pp // fewer
    return dataclasses.replace(layout, world=world, pp=1, vpp=1), fewer


def _divides(layout: ParallelLayout, by: int) -> bool:
    """Returns whether dividing the replicas by this gives a valid layout with enough replicas to simulate."""
    ranks = layout.world // layout.pp
    is_divisible = layout.expert_dp % by == 0 and ranks % by == 0 and ranks // by % layout.tp == 0
    return by == 1 or is_divisible and layout.expert_dp // by >= _REPLICAS


def _shares(
    stage: Sequence[Operator], stage_layout: ParallelLayout, state: StateBytes, chosen: Collection[str] | None = None
) -> dict[int, Counter[str]]:
    """Returns the bytes of each operator that each rank of a stage saves."""
    items: list[SaveItem] = cut_large_items(list_save_items(stage, stage_layout, state, chosen_experts=chosen))
    shares = {rank: Counter() for rank in range(stage_layout.world)}
    for item, rank in zip(items, assign_items(items, SCHEMES["EE+AN"]), strict=True):
        shares[rank][item.operator] += item.nbytes
    return shares


def _distinct_stages(operators: Sequence[Operator], layout: ParallelLayout) -> Iterator[tuple[list[Operator], int]]:
    """Yields one stage of each distinct set of sizes, with the number of such stages."""
    equal_stages: dict[tuple, list[list[Operator]]] = {}
    for stage in split_stages(operators, layout.pp):
        equal_stages.setdefault(tuple((o.kind, o.parameters) for o in stage), []).append(stage)
    for stages in equal_stages.values():
        yield stages[0], len(stages)
