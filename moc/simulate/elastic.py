"""Simulates an elastic job (Lazarus): losses that leave every expert, and the duration of an iteration afterwards.

The planner of elastic training (:mod:`moc.elastic`) plans for each number of nodes that occurs. ``--ckpt-policy auto``
uses how rarely a loss destroys an expert, which then requires a checkpoint (:class:`Lasting`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property
from math import comb, prod
from statistics import fmean

import numpy

from moc.elastic.allocation import MAX_DOMAIN_RANKS
from moc.elastic.plan import Plan, PlanSettings, make_plan
from moc.elastic.survival import TooManyNodesError, count_survived, survival_lower_bound
from moc.policy.expert_selection import CountsByLayer
from moc.sharding import ParallelLayout
from moc.simulate import SimulationError
from moc.simulate.cost import active, split_stages
from moc.simulate.policy_costs import Loss, SimulatedCosts, VaryingNodes, steps
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
    domain: int = MAX_DOMAIN_RANKS


@dataclass(frozen=True, eq=False)
class ElasticMembers(VaryingNodes):
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
        stage_nodes, ranks = self._stage(nodes)
        return stage_nodes * (ranks // self.tp)

    def slowdown(self, nodes: int) -> float:
        """Returns :meth:`Members.slowdown`, from rounds of micro batches and the wait for the rank with most tokens."""
        duration = steps(-(-self.micro_batches // self.trained_on(nodes)), len(self.stages), self.vpp)
        return duration / steps(self.usual, len(self.stages), self.vpp) * self.load_factor(nodes)

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
        stage_nodes, ranks = self._stage(self.least)
        experts = max((len(row) for rows in self.stages for row in rows), default=0)
        return -(-min(self.settings.least, stage_nodes) * experts // (stage_nodes * ranks))

    @cached_property
    def _plan(self):
        @cache
        def planned(rows: _Rows, nodes: int, ranks: int) -> Plan:
            settings = self.settings
            plan_settings = PlanSettings(self.slots, settings.least, settings.everywhere, ranks, settings.domain)
            return make_plan(range(nodes), dict(enumerate(rows)), plan_settings)

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
            base, remainder = divmod(nodes, len(self.stages))
            if lost > nodes or not base:
                return float(lost == 0)  # with fewer nodes than stages, each loss takes a stage
            choices = [1]
            for number, rows in enumerate(self.stages):
                choices = _product(choices, self._survived(rows, base + (number < remainder), lost), lost)
            return choices[lost] / comb(nodes, lost)

        return survival

    @cached_property
    def _survived(self):
        @cache
        def choices(rows: _Rows, nodes: int, lost: int) -> list[int]:
            """Returns, by nodes lost from a stage, the choices that leave everything; a lower bound if large."""
            replicas_by_node = numpy.ones((1, nodes), numpy.int64)  # the dense part
            if rows:
                placed = self._plan(rows, nodes, self.ranks)
                replicas_by_node = numpy.vstack(
                    [replicas_by_node, *(placed.replicas_by_node(layer) for layer in placed.tables)]
                )
            max_lost = min(lost, nodes)
            try:
                return count_survived(replicas_by_node, max_lost)
            except TooManyNodesError:
                return [
                    int(Fraction(survival_lower_bound(replicas_by_node, n)) * comb(nodes, n))
                    for n in range(max_lost + 1)
                ]

        return choices


def elastic_members(
    operators: Sequence[Operator],
    layout: ParallelLayout,
    micro_batches: int,
    topk: int,
    loads: Sequence[CountsByLayer],
    settings: ElasticSettings,
    members: VaryingNodes,
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
        positions = [
            at for at, layer in enumerate(layers) if any(o.layer == layer and o.kind == "expert" for o in stage)
        ]
        loads_of_stage = (
            tuple(stretched(summed[at % len(summed)], experts) if summed else [_EQUAL] * experts) for at in positions
        )
        rows.append(tuple(dict.fromkeys(loads_of_stage)))  # equal layers have equal plans
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
class ElasticCosts(SimulatedCosts):
    """Costs of a job that continues without a checkpoint while every expert is left."""

    def recovery_costs(self, loss: Loss, chance: float) -> SimulatedCosts:
        """Returns :meth:`PolicyCosts.recovery_costs` by the members' survival."""
        assert isinstance(self.members, ElasticMembers) and self.beyond is not None
        return self if chance < self.members.survival(loss.of, loss.total) else self.beyond


def _product(first: Sequence[int], second: Sequence[int], max_degree: int) -> list[int]:
    """Returns the product of two polynomials, up to a degree."""
    result = [0] * (max_degree + 1)
    for i, a in enumerate(first):
        for j, b in enumerate(second[: max_degree + 1 - i]):
            result[i + j] += a * b
    return result


AT_ONCE = 4
"""Maximum number of nodes lost together that is considered; a larger loss counts as the loss of an expert."""
MEMBERSHIPS = 8
"""Numbers of nodes that are considered, from the smallest, where a loss hurts most."""

Tokens = Mapping[int, Sequence[int]]
"""Tokens of each expert, by layer."""
Survival = Callable[[int, int], float]
"""Probability that all of a part of the model is left, by its number of nodes and of nodes that lose their state."""


@dataclass(frozen=True)
class Lasting:
    """Losses that an elastic job survives without a checkpoint.

    Attributes:
        least: MIN nodes.
        most: MAX nodes.
        ranks: ranks of a node that hold experts of a layer.
        experts: experts of a layer.
        settings: settings of the plans.
        parts: layers with experts of each part of the model, one part per node; one part if each node has complete
            copies.
    """

    least: int
    most: int
    ranks: int
    experts: int
    settings: ElasticSettings
    parts: tuple[tuple[int, ...], ...] = ((0,),)

    def survivals(self, loads: Tokens | None = None) -> tuple[float, ...]:
        """Returns, by nodes lost together (from 1), the probability that every expert is left, at the worst membership.

        Args:
            loads: loads that plans follow; equal for all experts if unknown.
        """
        sizes = range(self.least, min(self.most, self.least + MEMBERSHIPS - 1) + 1)
        parts = [self._survival(layers, loads) for layers in self.parts]
        return tuple(min(loss_survival(parts, n, lost, self.least) for n in sizes) for lost in range(1, AT_ONCE + 1))

    def _survival(self, layers: Sequence[int], loads: Tokens | None) -> Survival:
        load_by_layer, equal_loads, parts = loads or {}, (1,) * self.experts, len(self.parts)
        rows = dict.fromkeys(
            tuple(load_by_layer.get(layer, equal_loads)) for layer in layers
        )  # equal layers have equal plans
        copies = self.least // parts, self.most // parts
        return ElasticMembers(*copies, ranks=self.ranks, stages=(tuple(rows),), settings=self.settings).survival

    def rarer(self, mtbf_s: float, loads: Tokens | None = None) -> float:
        """Returns the number of losses per loss that destroys an expert.

        The probability of another loss before all have continued is the probability of a loss in :data:`REGROUP_S`
        seconds.

        Args:
            mtbf_s: seconds between losses.
            loads: as in :meth:`survivals`.
        """
        repeats, fatal, probability = min(1.0, REGROUP_S / mtbf_s), 0.0, 1.0
        for number, survives in enumerate((*self.survivals(loads), 0.0)):
            last = number == AT_ONCE
            fatal += probability * (1.0 if last else 1 - repeats) * (1 - survives)
            probability *= repeats
        return 1 / max(fatal, 1e-12)


def loss_survival(parts: Sequence[Survival], nodes: int, lost: int, min_nodes: int) -> float:
    """Returns the probability that a loss of ``lost`` random nodes leaves all of every part of the model.

    Nodes beyond complete copies count as nodes without state, although partial-model nodes have some.

    Args:
        parts: probabilities of the parts of the model.
        nodes: total number of nodes, at least the number of parts.
        lost: nodes lost together.
        min_nodes: minimum number of nodes to continue (MIN).
    """
    copies, waiting = divmod(nodes, len(parts))
    survival = 0.0
    for losses_by_part in itertools.product(range(min(lost, copies) + 1), repeat=len(parts)):
        waiting_losses = lost - sum(losses_by_part)
        if not 0 <= waiting_losses <= waiting:
            continue
        choices = comb(waiting, waiting_losses) * prod(comb(copies, part_losses) for part_losses in losses_by_part)
        remaining = nodes_kept(copies, losses_by_part, nodes - lost, min_nodes)
        survival += choices * prod(part(copies, copies - number) for part, number in zip(parts, remaining, strict=True))
    return survival / comb(nodes, lost) if lost <= nodes else 0.0


def nodes_kept(copies: int, lost: Sequence[int], survivors: int, min_nodes: int) -> list[int]:
    """Returns the nodes of each part that keep their state after a loss; pure, as is the controller's choice.

    A node moves to another part if that completes one more copy.  If several parts could give it, each counts as giving
    a node.  With fewer than MIN nodes left, all keep their state and wait.

    Args:
        copies: copies of the model before.
        lost: lost nodes of each part.
        survivors: remaining nodes, including nodes without a part.
        min_nodes: MIN nodes.
    """
    survivors_by_part = [copies - part_losses for part_losses in lost]
    later = survivors // len(lost) if survivors >= min_nodes else 0
    free = survivors - sum(survivors_by_part)
    move = max(0, sum(max(0, later - part_survivors) for part_survivors in survivors_by_part) - free)
    return [part_survivors - min(max(0, part_survivors - later), move) for part_survivors in survivors_by_part]
