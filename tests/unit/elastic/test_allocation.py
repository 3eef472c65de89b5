"""Replicas of each expert, by equation 1."""

import random

from moc.elastic.allocation import allocate_distinct, allocate_replicas, experts_by_load, feasible_replicas
from tests.errors import raises


def random_loads(rng):
    """Of up to 16 experts, many of them without any tokens."""
    experts = rng.randint(1, 16)
    steep = rng.choice([1, 10, 10**6])
    return [rng.randint(0, steep) * rng.randint(0, 1) for _ in range(experts)]


def test_replicas_keep_sum_order_and_minimum_for_any_loads():
    rng = random.Random(0)
    for _ in range(10_000):
        loads = random_loads(rng)
        nodes, slots = rng.randint(1, 16), rng.randint(1, 8)
        if nodes * slots < len(loads):
            continue
        least = feasible_replicas(rng.randint(1, 4), len(loads), nodes, slots)
        replicas = allocate_replicas(loads, nodes * slots, least)
        assert sum(replicas) == nodes * slots
        in_order = [replicas[expert] for expert in experts_by_load(loads)]
        assert in_order == sorted(in_order)
        assert in_order[0] >= least
        distinct = allocate_distinct(loads, nodes, slots, least)
        assert sum(distinct) == min(nodes * slots, nodes * len(loads))
        in_order = [distinct[expert] for expert in experts_by_load(loads)]
        assert in_order == sorted(in_order)
        assert least <= in_order[0] and in_order[-1] <= nodes


def test_replicas_are_proportional_to_loads():
    assert allocate_replicas([1, 1, 2, 4], 16, 2) == [2, 2, 4, 8]
    assert allocate_replicas([100, 1, 1], 12, 2) == [8, 2, 2]
    assert allocate_replicas([0, 0, 0], 7, 1) == [2, 2, 3]
    assert allocate_distinct([100, 1, 1], 4, 3, 2) == [4, 4, 4]
    assert allocate_distinct([100, 3, 1, 1], 4, 3, 2, everywhere=1) == [4, 4, 2, 2]


def test_minimum_replicas_are_reduced_to_available_slots():
    assert feasible_replicas(2, experts=16, nodes=10, slots=6) == 2
    assert feasible_replicas(2, experts=16, nodes=5, slots=6) == 1  # section 6.2
    assert feasible_replicas(3, experts=2, nodes=2, slots=6) == 2
    with raises("slots-too-few", "4 slots"):
        feasible_replicas(1, experts=16, nodes=5, slots=3)
    with raises("slots-too-few", "3 slots", "2 replicas"):
        allocate_replicas([1, 1], 3, 2)
