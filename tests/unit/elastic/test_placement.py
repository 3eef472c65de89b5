"""Where replicas of experts are placed: against every placement there is, where there are few."""

import functools
import itertools
from math import comb

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.elastic.allocation import PlanSettings, allocate_distinct, experts_by_load, feasible_replicas
from moc.elastic.objective import LossModel, fatal_share, predicted_time
from moc.elastic.placement import (
    EMPTY,
    level_groups,
    place_compact,
    place_overlapping,
    place_replicas,
    place_spread,
    replicas_by_node,
    representative_counts,
    without_repetition,
)
from moc.elastic.plan import make_plan
from moc.elastic.survival import count_survived, survival_probability, survival_score
from tests.cases import each_row
from tests.unit.policy.routing import RECORDED


@functools.cache
def every_placement(nodes, slots, experts):
    """Nodes of each expert [placements, experts], and choices survived by number of lost nodes, of all placements."""
    rows = [sum(1 << e for e in row) for n in range(1, slots + 1) for row in itertools.combinations(range(experts), n)]
    tables = numpy.array(list(itertools.combinations_with_replacement(rows, nodes)))  # nodes are alike
    counts = numpy.stack([((tables >> expert) & 1).sum(axis=1) for expert in range(experts)], axis=1)
    choices = numpy.zeros((len(tables), nodes + 1), numpy.int64)
    for lost in range(1 << nodes):
        left = [node for node in range(nodes) if not lost >> node & 1]
        union = numpy.bitwise_or.reduce(tables[:, left], axis=1) if left else numpy.zeros(len(tables), numpy.int64)
        choices[:, nodes - len(left)] += union == (1 << experts) - 1
    return counts, choices


def best(replicas, nodes, slots):
    """Choices that any placement survives, by number of lost nodes."""
    counts, choices = every_placement(nodes, slots, len(replicas))
    return choices[(counts <= numpy.array(replicas)).all(axis=1)].max(axis=0).tolist()


def ascending_replicas(nodes, slots, experts):
    """All ways to share out the slots."""

    def extend(head, left):
        if len(head) == experts - 1:
            yield (*head, left)
            return
        for count in range(head[-1] if head else 1, left // (experts - len(head)) + 1):
            yield from extend((*head, count), left - count)

    return extend((), nodes * slots)


SIZES = [
    (nodes, slots, experts)
    for nodes, slots, experts in itertools.product(range(1, 6), range(1, 4), range(1, 6))
    if experts <= nodes * slots
]


@each_row(("nodes", "slots", "experts"), SIZES)
def test_placement_survival_is_optimal(nodes, slots, experts):
    for replicas in ascending_replicas(nodes, slots, experts):
        table = place_replicas(replicas, nodes, slots)
        assert count_survived(replicas_by_node(table, experts), nodes) == best(replicas, nodes, slots), replicas


def test_theorem_1_holds_with_enough_nodes():
    beyond = 0
    for nodes, slots, experts in SIZES:
        for replicas in ascending_replicas(nodes, slots, experts):
            table = place_overlapping(numpy.array(replicas), nodes, slots)
            optimal = count_survived(replicas_by_node(table, experts), nodes) == best(replicas, nodes, slots)
            suffice = sum(representative_counts(replicas, slots)) <= nodes
            assert optimal or not suffice, (nodes, slots, replicas)
            beyond += not optimal
    assert beyond > 10  # it is no theorem without the condition


def chances(table, experts, lost):
    nodes = len(table)
    return count_survived(replicas_by_node(table, experts), nodes)[lost], comb(nodes, lost)


def test_placement_beats_counterexample_one_of_theorem_1():
    replicas = (2, 3, 3)
    assert chances(place_overlapping(numpy.array(replicas), 4, 2), 3, lost=2) == (4, 6)
    assert chances(place_replicas(replicas, 4, 2), 3, lost=2) == (5, 6)


def test_theorem_1_counterexample_without_f():
    replicas = (2, 2, 2)
    assert (replicas_by_node(place_overlapping(numpy.array(replicas), 3, 2), 3) > 0).sum(axis=1).min() == 1
    assert chances(place_replicas(replicas, 3, 2), 3, lost=1) == (3, 3)


def test_placement_beats_figure_4():
    a = [[0, 2, 3, 3], [0, 1, 3, 3], [1, 3, 3, 3], [1, 2, 3, 3], [2, 3, 3, 3]]
    assert chances(numpy.array(a), 4, lost=3) == (5, 10)
    assert chances(place_replicas((2, 3, 3, 12), 5, 4), 4, lost=3) == (7, 10)


@each_row("everywhere", [0, 1, 2])
def test_experts_have_replicas_and_hottest_are_on_all_nodes(everywhere):
    rng = numpy.random.default_rng(0)
    for _ in range(60):
        nodes, slots = int(rng.integers(2, 30)), int(rng.integers(3, 9))
        experts = int(rng.integers(3, nodes * (slots - everywhere) + everywhere + 1))
        loads = rng.integers(0, 100, experts).tolist()
        least = feasible_replicas(2, experts - everywhere, nodes, slots - everywhere)
        replicas = allocate_distinct(loads, nodes, slots, least, everywhere)
        coldest_first = experts_by_load(loads)
        hottest = coldest_first[experts - everywhere :]
        table = place_replicas(replicas, nodes, slots, hottest)
        held = replicas_by_node(table, experts)
        assert held.sum(axis=1).tolist() == replicas
        assert (held > 0).sum(axis=1).min() >= least
        assert (held[hottest] == 1).all()
        more = replicas_by_node(without_repetition(table, coldest_first[::-1]), experts)
        assert more.max() == 1 and more.sum() == nodes * min(slots, experts)
        assert (more >= (held > 0)).all()


def test_spread_and_compact_placements_match_examples():
    assert place_spread([2, 9], 10, 6)[:, :2].tolist() == [[0, 1]] + [[0, EMPTY]] + [[1, EMPTY]] * 8
    assert [set(row) - {EMPTY} for row in place_compact([2, 9], 10, 6)[:2].tolist()] == [{0, 1}, {1}]


def test_only_required_groups_are_spread_on_many_nodes():
    replicas = [9] * 8  # three groups of 3 on 24 nodes, where 27 are needed
    placed, all_spread = (
        survival_score(replicas_by_node(table, 8))
        for table in (place_replicas(replicas, 24, 3), place_spread(replicas, 24, 3))
    )
    mro = survival_score(replicas_by_node(place_overlapping(replicas, 24, 3), 8))
    assert placed[0] == all_spread[0] == 9 > mro[0]  # of the smallest set of holders
    assert placed > all_spread


STEPS = 5, 20, 60, 120, 200, 300  # of the recording


def routed(step, experts, layers):
    """Loads of the hottest experts of some layers of a recorded run."""
    tokens = numpy.load(RECORDED)["tokens"][step, :layers]
    return [[int(row[expert]) for expert in sorted(numpy.argsort(row, kind="stable")[-experts:])] for row in tokens]


def placed(nodes, slots, experts, layers=12, steps=STEPS):
    """Mean work of the busiest node relative to the mean, and the probabilities to survive one and two losses."""
    found = []
    for step in steps:
        loads = routed(step, experts, layers)
        plan = make_plan(range(nodes), dict(enumerate(loads)), PlanSettings(slots, min_replicas=2))
        held = numpy.concatenate([plan.replicas_by_node(layer) for layer in plan.tables])
        busiest = numpy.mean([plan.imbalance(layer, row) for layer, row in enumerate(loads)])
        found.append((busiest, survival_probability(held, 1), survival_probability(held, 2)))
    return numpy.mean(found, axis=0)


needs_recording = pytest.mark.skipif(not RECORDED.exists(), reason="the recorded loads are not on this machine")


@needs_recording
def test_groups_of_equal_replica_count_have_level_load():
    """By number, the busiest node of these experts has 2.1 times the mean work."""
    busiest, one, two = placed(8, 4, 16)
    assert busiest <= 1.6 and one == 1.0 and two == pytest.approx(6 / 7)


@needs_recording
def test_additional_slots_never_increase_busiest_load():
    busiest = [placed(8, slots, 32, layers=4, steps=STEPS[:3])[0] for slots in range(4, 12)]
    assert all(more <= less + 0.01 for less, more in itertools.pairwise(busiest))


@needs_recording
def test_missing_slot_leaves_one_expert_with_one_replica():
    busiest, one, _ = placed(9, 7, 32)
    assert one >= 0.85 and busiest <= 2.29


@given(st.lists(st.integers(0, 100), min_size=1, max_size=24), st.integers(1, 6), st.randoms())
def test_levelling_swaps_experts_of_equal_replica_count(loads, slots, rng):
    replicas = [rng.randint(1, 3) for _ in loads]
    order = level_groups(loads, replicas, slots)
    assert sorted(order) == [*range(len(loads))] and [replicas[expert] for expert in order] == sorted(replicas)


def test_survival_and_balance_shorten_predicted_time():
    losses = LossModel(mtbf_s=3600.0, restore_s=600.0, also_lost=0.1)
    assert fatal_share([2, 2, 2, 2], 8, losses) == pytest.approx(0.09 * 4 / 28 + 0.009 * 4 * 6 / 56, rel=0.1)
    assert predicted_time(1.2, [2, 2], 8, losses) < predicted_time(1.2, [1, 2], 8, losses)
    assert predicted_time(1.2, [1, 2], 8, losses) < predicted_time(2.1, [2, 2], 8, losses)
