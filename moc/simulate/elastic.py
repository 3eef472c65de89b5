"""Simulates an elastic job (Lazarus): losses that leave every expert, and the duration of an iteration afterwards.

The planner of elastic training (:mod:`moc.elastic`) plans for each number of nodes that occurs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from math import comb
from statistics import fmean

import numpy

from moc.elastic.domains import MOST_RANKS
from moc.elastic.plan import Plan, Settings, plan
from moc.elastic.survival import TooManyNodesError, least_survival, survived
from moc.policy.expert_selection import CountsByLayer
from moc.sharding import Layout
from moc.simulate.cost import active
from moc.simulate.errors import SimulationError
from moc.simulate.members import Members, steps
from moc.simulate.policy_costs import Loss, PolicyCosts
from moc.simulate.stages import split_stages
from moc.state.operators import Operator

REGROUP_S = 30.0
"""Seconds from a loss until training continues, with transfers: 20 to 40 (Lazarus, section 6.3)."""

_EQUAL = 10**6  # tokens of each expert, if loads are unknown
_Rows = tuple[tuple[int, ...], ...]  # distinct loads of layers


@dataclass(frozen=True)
class ElasticSettings:
    """Requested settings of an elastic job.

    Attributes:
        slots: experts of a layer that a rank can hold; None for the number that holds ``least`` replicas on MIN nodes.
        least: replicas of each expert on different nodes (f).
        everywhere: number of hottest experts that are on every node (h); None to choose it by the load.
        regroup_s: seconds from the end of detection until training continues, with transfers.
        losses: numbers of nodes lost together in the expected losses, for the interval of fallback checkpoints.
        domain: maximum number of ranks that dispatch tokens to each other.
    """

    slots: int | None = None
    least: int = 2
    everywhere: int | None = None
    regroup_s: float = REGROUP_S
    losses: tuple[int, ...] = (1,)
    domain: int = MOST_RANKS


@dataclass(frozen=True, eq=False)
class ElasticMembers(Members):
    """Nodes of an elastic job.

    Stages get equally many nodes, or one more.  With fewer nodes than stages, a node has several stages.  Every rank of
    a stage holds experts.  Tensor-parallel groups of a stage train on different samples; the smallest stage limits
    their number.  The dense part is on every rank of its stage.

    Attributes:
        ranks: ranks of a node.
        tp: ranks that share the dense part of a stage.
        vpp: virtual stages of a stage.
        micro_batches: B, micro batches of the global batch.
        usual: micro batches of a rank in the job's iteration.
        stages: by stage, the loads of its layers with experts.
        share: share of an iteration's operations in experts.
        settings: requested settings.
    """

    ranks: int = 1
    tp: int = 1
    vpp: int = 1
    micro_batches: int = 1
    usual: float = 1.0
    stages: tuple[_Rows, ...] = ()
    share: float = 0.0
    settings: ElasticSettings = field(default_factory=ElasticSettings)

    def __post_init__(self):
        super().__post_init__()
        if self.ranks % self.tp:
            raise SimulationError(
                f"nodes of {self.ranks} GPUs are not divided by a tensor parallelism of {self.tp}. Fix: choose a "
                "tensor parallelism that divides them",
                code="workers-not-divisible",
            )
        for nodes in {self.least, self.most}:
            if not self.trained_on(nodes):
                raise SimulationError(
                    f"{nodes} nodes cannot hold {len(self.stages)} stages. Fix: raise --min-nodes",
                    code="nodes-too-few",
                )
            self.slowdown(nodes)  # raises if the slots do not suffice

    def _stage(self, nodes: int) -> tuple[int, int]:
        """Returns the nodes of the smallest stage, and its ranks on each."""
        stages = len(self.stages)
        return max(1, nodes // stages), min(self.ranks, self.ranks * nodes // stages)

    def trained_on(self, nodes: int) -> int:
        """Returns D: data-parallel ranks of this many nodes."""
        of_stage, ranks = self._stage(nodes)
        return of_stage * (ranks // self.tp)

    def slowdown(self, nodes: int) -> float:
        """Returns :meth:`Members.slowdown`, from rounds of micro batches and the wait for the rank with most tokens."""
        now = steps(-(-self.micro_batches // self.trained_on(nodes)), len(self.stages), self.vpp)
        return now / steps(self.usual, len(self.stages), self.vpp) * self.load_factor(nodes)

    def load_factor(self, nodes: int) -> float:
        """Returns the duration of a micro batch in the busiest stage, relative to equal work for all ranks."""
        return 1 + self.share * (max(self._imbalance(rows, *self._stage(nodes)) for rows in self.stages) - 1)

    def survival(self, nodes: int, lost: int) -> float:
        """Returns the probability that losing ``lost`` of this many nodes leaves every expert and every stage."""
        return self._survival(nodes, lost)

    @cached_property
    def slots(self) -> int:
        """Experts of a layer that a rank can hold."""
        if self.settings.slots is not None:
            return self.settings.slots
        of_stage, ranks = self._stage(self.least)
        experts = max((len(row) for rows in self.stages for row in rows), default=0)
        return -(-min(self.settings.least, of_stage) * experts // (of_stage * ranks))

    @cached_property
    def _plan(self):
        @cache
        def planned(rows: _Rows, nodes: int, ranks: int) -> Plan:
            asked = self.settings
            settings = Settings(self.slots, asked.least, asked.everywhere, ranks, asked.domain)
            return plan(range(nodes), dict(enumerate(rows)), settings)

        return planned

    @cached_property
    def _imbalance(self):
        @cache
        def imbalance(rows: _Rows, nodes: int, ranks: int) -> float:
            if not rows:
                return 1.0
            planned = self._plan(rows, nodes, ranks)
            return fmean([planned.imbalance(layer, row) for layer, row in enumerate(rows)])

        return imbalance

    @cached_property
    def _survival(self):
        @cache
        def survival(nodes: int, lost: int) -> float:
            base, more = divmod(nodes, len(self.stages))
            if lost > nodes or not base:
                return float(lost == 0)  # with fewer nodes than stages, each loss takes a stage
            ways = [1]
            for number, rows in enumerate(self.stages):
                ways = _product(ways, self._survived(rows, base + (number < more), lost), lost)
            return ways[lost] / comb(nodes, lost)

        return survival

    @cached_property
    def _survived(self):
        @cache
        def choices(rows: _Rows, nodes: int, lost: int) -> list[int]:
            """Returns, by nodes lost from a stage, the choices that leave everything; a lower bound if large."""
            held = numpy.ones((1, nodes), numpy.int64)  # the dense part
            if rows:
                placed = self._plan(rows, nodes, self.ranks)
                held = numpy.vstack([held, *(placed.held_by_nodes(layer) for layer in placed.tables)])
            most = min(lost, nodes)
            try:
                return survived(held, most)
            except TooManyNodesError:
                return [int(Fraction(least_survival(held, n)) * comb(nodes, n)) for n in range(most + 1)]

        return choices


def elastic_members(
    operators: Sequence[Operator],
    layout: Layout,
    micro_batches: int,
    topk: int,
    loads: Sequence[CountsByLayer],
    settings: ElasticSettings,
    members: Members,
    ranks: int,
) -> ElasticMembers:
    """Returns the members of an elastic job of a model.

    Args:
        operators: operators of the unpartitioned model.
        layout: TP, PP and VPP of all nodes; plans place experts on the ranks of a stage.
        micro_batches: B.
        topk: experts per token.
        loads: recorded loads by iteration and layer; plans use their sum, or equal loads if empty.
        settings: requested settings.
        members: MIN, MAX and the waits.
        ranks: ranks of a node.

    Raises:
        ValueError: MIN nodes cannot hold the model.
    """
    stages = split_stages(operators, layout.pp)
    experts = 1 + max((o.expert for o in operators if o.expert is not None), default=-1)
    summed = [numpy.sum([row[layer] for row in loads], axis=0) for layer in sorted(loads[0])] if loads else []
    layers = sorted({o.layer for o in operators if o.kind == "expert" and o.layer is not None})
    rows = []
    for stage in stages:
        places = [at for at, layer in enumerate(layers) if any(o.layer == layer and o.kind == "expert" for o in stage)]
        found = (tuple(stretched(summed[at % len(summed)], experts) if summed else [_EQUAL] * experts) for at in places)
        rows.append(tuple(dict.fromkeys(found)))  # equal layers have equal plans
    dense = sum(active([o for o in operators if o.kind != "expert"], topk))
    return ElasticMembers(
        **{name: getattr(members, name) for name in ("least", "most", "grow_wait_s")},
        grow_s=settings.regroup_s,
        ranks=ranks,
        tp=layout.tp,
        vpp=layout.vpp,
        micro_batches=micro_batches,
        usual=micro_batches / layout.dp,
        stages=tuple(rows),
        share=1 - dense / sum(active(operators, topk)),
        settings=settings,
    )


def stretched(tokens: Sequence[int] | numpy.ndarray, experts: int) -> list[int]:
    """Returns loads of another number of experts in the same shape: hottest first, sampled at equal distances."""
    descending = numpy.sort(numpy.asarray(tokens))[::-1]
    if len(descending) == experts:
        return descending.tolist()
    places = (numpy.arange(experts) + 0.5) * len(descending) / experts - 0.5
    return numpy.interp(places, numpy.arange(len(descending)), descending).astype(int).tolist()


@dataclass(frozen=True)
class ElasticCosts(PolicyCosts):
    """Costs of a job that continues without a checkpoint while every expert is left."""

    def way_back(self, loss: Loss, chance: float) -> PolicyCosts:
        """Returns :meth:`PolicyCosts.way_back` by the members' survival."""
        assert isinstance(self.members, ElasticMembers) and self.beyond is not None
        return self if chance < self.members.survival(loss.of, loss.total) else self.beyond


def _product(one: Sequence[int], other: Sequence[int], most: int) -> list[int]:
    """Returns the product of two polynomials, up to a degree."""
    result = [0] * (most + 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other[: most + 1 - i]):
            result[i + j] += a * b
    return result
