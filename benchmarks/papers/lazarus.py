"""Lazarus' Figure 8: whether every expert survives, by where its replicas stand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.papers.reproduction import Reproduction, Row

_NODES, _SLOTS, _LAYERS, _LEAST = 10, 6, 12, 2  # section 6.1
_EXPERTS_S, _EXPERTS_L = 8, 16  # GPT-S and GPT-L, Table 1
_POPULAR = 0.87  # of the tokens go to two of 16 experts, at most (section 2.1, Figure 2)
_BALANCED = 0.2  # the largest exponent of GPT-S at step 4000, "relatively more balanced"

Place = frozenset[int]
"""The nodes that hold an expert."""


def figure_8() -> Reproduction:
    """Lazarus' Figure 8, as section 6.3 has it in numbers."""
    large, small = _layers(_EXPERTS_L, _exponent(_POPULAR)), _layers(_EXPERTS_S, _BALANCED)
    rows = [
        _row("GPT-L, step 200, 1 lost, MRO", 100, _in_order(large), 1, excluded="that could not fail"),
        _row("GPT-L, step 200, 4 lost, MRO, nodes in one order", 41, _in_order(large), 4),
        _row("GPT-L, step 200, 4 lost, MRO, nodes by what they held", 41, _with_least_transfer(large), 4),
        _row("GPT-L, step 200, 4 lost, spread", 12, _everywhere(large, spread), 4),
        *(_row(f"GPT-L, step 200, {n} lost, compact", 0, _everywhere(large, compact), n) for n in (1, 2, 4)),
        *(_row(f"GPT-S, step 4000, {n} lost, compact", 0, _everywhere(small, compact), n, "above") for n in (1, 2)),
    ]
    notes = (
        "Percent of all choices of lost nodes in which every expert of every layer has a replica left.  Inputs: 10",
        "nodes of 6 slots, 12 layers of 8 or 16 experts, at least 2 replicas (section 6.1); replicas by equation 1.",
        "Chosen, since the routing trace is not in the paper: popularity by Zipf's law, in a random order in each",
        f"layer, its exponent from 0 to {_exponent(_POPULAR):.2f} over the layers of GPT-L (87 % of the tokens to two",
        f"experts, section 2.1) and to {_BALANCED} in GPT-S at step 4000.  Spread and compact place experts by number.",
        "Which node of a plan is which is left open by section 4.1, and not said by the figure; two ways are shown:",
        "the first group on the first nodes in every layer, or the greedy mapping of section 4.3 from equal loads.",
    )
    fitted = (
        f"Zipf's law for the popularity of experts, up to an exponent of {_exponent(_POPULAR):.2f} in GPT-L",
        f"{_BALANCED} in GPT-S at step 4000",
    )
    title = "Lazarus, Figure 8: probability of recovery when several nodes are lost"
    return Reproduction(title, tuple(rows), notes, "every choice of lost nodes is as likely", fitted)


def _row(label: str, paper: float, places: Iterable[Place], lost: int, bound: str = "", excluded: str = "") -> Row:
    return Row(label, paper, 100 * survives(places, lost), "percent", bound, excluded)


def survives(places: Iterable[Place], lost: int) -> float:
    """Share of the choices of so many lost nodes that leave each expert a node."""
    places = set(places)
    choices = [set(nodes) for nodes in itertools.combinations(range(_NODES), lost)]
    return sum(not any(place <= nodes for place in places) for nodes in choices) / len(choices)


def allocate(loads: Sequence[float], slots: int, least: int) -> list[int]:
    """Replicas of each expert, f = ``least`` or more, of so many slots, by tokens in ascending order (equation 1)."""
    replicas: list[int] = []
    for place, load in enumerate(loads):
        share = load / sum(loads[place:]) * (slots - sum(replicas))
        replicas.append(max(math.floor(share + 1e-9), least))
    return replicas


def maximum_rank_overlap(replicas: Sequence[int]) -> list[set[int]]:
    """The experts on each node, for replicas in ascending order (section 4.1)."""
    nodes: list[set[int]] = [set() for _ in range(_NODES)]
    room, left, start = [_SLOTS] * _NODES, list(replicas), 0
    for first in range(0, len(replicas), _SLOTS):
        group = range(first, min(first + _SLOTS, len(replicas)))
        end = min(start + replicas[first], _NODES)
        for node, expert in itertools.product(range(start, end), group):
            nodes[node].add(expert)
            room[node] -= 1
            left[expert] -= 1
        start = end
    for expert in (e for e, count in enumerate(left) for _ in range(count)):
        node = max(range(_NODES), key=room.__getitem__)
        nodes[node].add(expert)
        room[node] -= 1
    return nodes


def spread(replicas: Sequence[int]) -> list[Place]:
    """Replicas of an expert on one node after the other, and the next expert's after them."""
    return [frozenset(slot % _NODES for slot in slots) for slots in _in_a_row(replicas)]


def compact(replicas: Sequence[int]) -> list[Place]:
    """One node is filled after the other."""
    return [frozenset(slot // _SLOTS for slot in slots) for slots in _in_a_row(replicas)]


def _in_a_row(replicas: Sequence[int]) -> Iterator[range]:
    ends = list(itertools.accumulate(replicas))
    return (range(end - count, end) for end, count in zip(ends, replicas, strict=True))


Layer = tuple[list[int], list[int]]
"""Experts from the least to the most popular, and their replicas in that order."""


def _layers(experts: int, steepest: float) -> list[Layer]:
    rng, layers = random.Random(0), []
    for layer in range(_LAYERS):
        order = rng.sample(range(experts), experts)
        loads = _zipf(experts, steepest * layer / (_LAYERS - 1))
        layers.append((order, allocate(loads, _NODES * _SLOTS, _LEAST)))
    return layers


def _zipf(experts: int, exponent: float) -> list[float]:
    return [rank**-exponent for rank in range(experts, 0, -1)]


def _exponent(popular: float) -> float:
    """At which so large a share of the tokens goes to two experts of GPT-L."""
    low, high = 0.0, 10.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        loads = _zipf(_EXPERTS_L, middle)
        low, high = (middle, high) if sum(loads[-2:]) < popular * sum(loads) else (low, middle)
    return low


def _everywhere(layers: Sequence[Layer], place) -> Iterator[Place]:
    for order, replicas in layers:
        by_number = [count for _, count in sorted(zip(order, replicas, strict=True))]
        yield from place(by_number)


def _in_order(layers: Sequence[Layer]) -> Iterator[Place]:
    for _, replicas in layers:
        yield from _places(maximum_rank_overlap(replicas))


def _with_least_transfer(layers: Sequence[Layer]) -> Iterator[Place]:
    """Each node takes the part of the new plan that it has most of, one node after the other (section 4.3)."""
    for order, replicas in layers:
        count = len(order)
        held = maximum_rank_overlap(allocate([1.0] * count, _NODES * _SLOTS, _LEAST))
        parts = [{order[expert] for expert in node} for node in maximum_rank_overlap(replicas)]
        taken = []
        for node in held:
            taken.append(min(parts, key=lambda part: len(part - node)))
            parts.remove(taken[-1])
        yield from _places(taken)


def _places(nodes: Sequence[set[int]]) -> Iterator[Place]:
    for expert in set().union(*nodes):
        yield frozenset(number for number, held in enumerate(nodes) if expert in held)
