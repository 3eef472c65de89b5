"""Reproduces Lazarus' Figures 4 and 8: the probability that every expert survives, by placement of replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy

from benchmarks.papers.moetion import Loads
from benchmarks.papers.reproduction import Reproduction, Row
from moc.elastic.allocation import allocate_replicas, experts_by_load
from moc.elastic.placement import place_compact, place_overlapping, place_replicas, place_spread, replicas_by_node
from moc.elastic.plan import PlanSettings, make_plan
from moc.elastic.survival import survival_probability

_NODES, _SLOTS, _LAYERS, _LEAST = 10, 6, 12, 2  # section 6.1
_EXPERTS_S, _EXPERTS_L = 8, 16  # GPT-S and GPT-L, Table 1
_STEP_200 = 20  # index in the recording, which has every tenth step from the first

_PLAN_A = ((0, 2, 3, 3), (0, 1, 3, 3), (1, 3, 3, 3), (1, 2, 3, 3), (2, 3, 3, 3))
"""Experts by node in Figure 4's plan A; D fills the slots left open by the surviving choices in the text."""

Placement = Callable[[Sequence[int], int, int], numpy.ndarray]
"""Function from replicas, nodes and slots to a table of experts, [nodes, slots]."""


def figure_4() -> Reproduction:
    """Reproduces Lazarus' Figure 4: four experts on five nodes with four slots."""
    replicas = (2, 3, 3, 12)
    rows = (
        Row("plan A, 3 lost", 50, 100 * survival_probability(replicas_by_node(numpy.array(_PLAN_A), 4), 3), "percent"),
        Row(
            "plan B, 3 lost",
            70,
            100 * survival_probability(replicas_by_node(place_replicas(replicas, 5, 4), 4), 3),
            "percent",
        ),
    )
    notes = (
        "Percent of all choices of lost nodes that leave a replica of each expert.  Plan A holds ACD, ABD, BD, BCD",
        "and CD by node, as the five cases of section 4.1 show.  Plan B is placed by maximum rank overlap.",
    )
    title = "Lazarus, Figure 4: probability of recovery by placement"
    return Reproduction(title, rows, notes, "every choice of lost nodes is as likely", ("plan A, from its five cases",))


def figure_8(loads: Loads) -> Reproduction:
    """Reproduces the numbers of section 6.3 for Lazarus' Figure 8 on recorded expert loads.

    Raises:
        ValueError: the recording is too short, or has too few layers or experts.
    """
    if len(loads) <= _STEP_200 or len(loads[0]) < _LAYERS or len(loads[0][0]) < _EXPERTS_L:
        raise ValueError(f"it needs more than {_STEP_200} iterations of {_LAYERS} layers with {_EXPERTS_L} experts")
    large, first = (_hottest(loads[step], _EXPERTS_L) for step in (_STEP_200, 0))
    small = _hottest(loads[-1], _EXPERTS_S)
    ours = make_plan(range(_NODES), dict(enumerate(large)), PlanSettings(_SLOTS, _LEAST))
    planned = numpy.concatenate([ours.replicas_by_node(layer) for layer in range(_LAYERS)])
    rows = [
        _row("GPT-L, step 200, 1 lost, MRO", 100, _placed(large, aligned), 1, excluded="that could not fail"),
        _row("GPT-L, step 200, 4 lost, MRO, nodes in one order", 41, _placed(large, aligned), 4),
        _row("GPT-L, step 200, 4 lost, MRO, each layer by fewest transfers", 41, _with_least_transfer(first, large), 4),
        _row("GPT-L, step 200, 4 lost, our plan", 41, planned, 4),
        _row("GPT-L, step 200, 4 lost, spread", 12, _placed(large, place_spread), 4),
        *(_row(f"GPT-L, step 200, {n} lost, compact", 0, _placed(large, place_compact), n) for n in (1, 2, 4)),
        *(_row(f"GPT-S, late, {n} lost, compact", 0, _placed(small, place_compact), n, "above") for n in (1, 2)),
    ]
    notes = (
        "Percent of all choices of lost nodes that leave a replica of every expert of every layer.  Inputs: 10 nodes",
        "of 6 slots, 12 layers of 8 or 16 experts, at least 2 replicas (section 6.1); replicas by equation 1.  The",
        "routing trace is SmartMoE's, as in the paper: the hottest experts of each layer at that step; GPT-S at the",
        "last recorded step, since step 4000 is missing.  Spread and compact place experts by number.  Section 4.1",
        "does not specify the order of a plan's nodes.  It is the same in all layers, or each layer separately has the",
        "order with fewest transfers (section 4.3) from the first step's plan.  Our plan has one order, hot experts",
        "everywhere.",
    )
    title = "Lazarus, Figure 8: probability of recovery when several nodes are lost"
    fitted = ("the hottest experts of the first 12 of the trace's 24 layers",)
    return Reproduction(title, tuple(rows), notes, "every choice of lost nodes is as likely", fitted)


def _row(label: str, paper: float, held: numpy.ndarray, lost: int, bound: str = "", excluded: str = "") -> Row:
    return Row(label, paper, 100 * survival_probability(held, lost), "percent", bound, excluded)


def _hottest(layers: Sequence[Sequence[int]], experts: int) -> list[list[int]]:
    """Returns the loads of each layer's ``experts`` hottest experts, in the order of the experts."""
    found = []
    for row in layers[:_LAYERS]:
        kept = sorted(experts_by_load(row)[-experts:])
        found.append([row[expert] for expert in kept])
    return found


def _placed(layers: Sequence[Sequence[int]], placement: Placement) -> numpy.ndarray:
    return numpy.concatenate([replicas_by_node(_table(row, placement), len(row)) for row in layers])


def _table(loads: Sequence[int], placement: Placement) -> numpy.ndarray:
    return placement(allocate_replicas(loads, _NODES * _SLOTS, _LEAST), _NODES, _SLOTS)


def aligned(replicas: Sequence[int], nodes: int, slots: int) -> numpy.ndarray:
    """Returns the paper's maximum rank overlap placement, if there are as many nodes as it needs."""
    order = numpy.array(experts_by_load(replicas))
    return order[place_overlapping([replicas[expert] for expert in order], nodes, slots)]


def _with_least_transfer(before: Sequence[Sequence[int]], layers: Sequence[Sequence[int]]) -> numpy.ndarray:
    """Lets one node after the other take the part of a layer's plan that it already holds most of (section 4.3)."""
    found = []
    for old, new in zip(before, layers, strict=True):
        parts = [set(row) for row in _table(new, aligned).tolist()]
        held = numpy.zeros((len(new), _NODES), int)
        for node, has in enumerate(_table(old, aligned).tolist()):
            part = min(parts, key=lambda part: len(part.difference(has)))
            parts.remove(part)
            held[list(part), node] = 1
        found.append(held)
    return numpy.concatenate(found)
