"""Copies on other nodes: every node keeps as much, and as many losses at once as possible are survived."""

from itertools import combinations, islice, permutations, product
from math import comb, isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.recovery.copy_placement import Placement, describe_placement, not_sent, place_copies, survival
from tests.cases import each_row

sizes = st.integers(1, 40).flatmap(lambda nodes: st.tuples(st.just(nodes), st.integers(0, nodes - 1)))


def survived(holders, lost):
    """Of all ways to lose nodes, the share that leaves a holder of everything: by trying all of them."""
    sets = [{node, *others} for node, others in holders.items()]
    ways = list(combinations(holders, lost))
    return sum(not any(one <= set(way) for one in sets) for way in ways) / len(ways)


@settings(deadline=None)
@given(sizes)
def test_each_node_has_remote_copies_and_keeps_as_many(size):
    nodes, replicas = size
    placement = place_copies(nodes, replicas)
    assert sorted(placement.holders) == list(range(nodes))
    for node, holders in placement.holders.items():
        assert len({node, *holders}) == replicas + 1
        assert len(placement.kept_by(node)) == replicas
        assert all(node in placement.kept_by(holder) for holder in holders)


@settings(deadline=None)
@given(sizes)
def test_groups_are_as_small_as_possible(size):
    nodes, replicas = size
    *groups, last = place_copies(nodes, replicas).groups
    assert all(len(group) == replicas + 1 for group in groups)
    assert replicas + 1 <= len(last) < 2 * (replicas + 1)


@each_row("nodes", range(1, 10))
def test_survival_matches_enumeration_of_losses(nodes):
    for replicas in range(nodes):
        placement = place_copies(nodes, replicas)
        for lost in range(nodes + 1):
            assert isclose(survival(placement, lost), survived(placement.holders, lost)), (replicas, lost)


@settings(deadline=None)
@given(sizes)
def test_losing_as_many_nodes_as_peer_copies_is_survived(size):
    nodes, replicas = size
    placement = place_copies(nodes, replicas)
    assert all(survival(placement, lost) == 1 for lost in range(replicas + 1))
    assert all(survival(placement, lost) < 1 for lost in range(replicas + 1, nodes + 1))


def placements(nodes, replicas):
    """All that there are."""
    choices = [
        list(combinations([other for other in range(nodes) if other != node], replicas)) for node in range(nodes)
    ]
    return (dict(enumerate(holders)) for holders in product(*choices))


def is_balanced(holders, replicas):
    """Whether every node keeps as much as every other."""
    return all(sum(node in others for others in holders.values()) == replicas for node in holders)


def deadly(holders):
    """How many ways to lose as many nodes as there are copies take all copies of something."""
    return len({frozenset({node, *others}) for node, others in holders.items()})


@each_row("nodes, replicas", [(2, 1), (4, 1), (6, 1), (3, 2)])
def test_no_placement_is_better_than_groups(nodes, replicas):
    fewest = min(map(deadly, placements(nodes, replicas)))
    assert isclose(survival(place_copies(nodes, replicas), replicas + 1), 1 - fewest / comb(nodes, replicas + 1))


@each_row("nodes, replicas", [(3, 1), (5, 1), (4, 2), (5, 3)])
def test_ring_is_best_of_equal_copy_placements(nodes, replicas):
    fewest = min(deadly(holders) for holders in placements(nodes, replicas) if is_balanced(holders, replicas))
    assert isclose(survival(place_copies(nodes, replicas), replicas + 1), 1 - fewest / comb(nodes, replicas + 1))


def alike_among(nodes):
    """What sets of nodes hold alike, at random."""
    some = st.sets(st.integers(0, nodes - 1), min_size=2, max_size=nodes).map(frozenset)
    return st.dictionaries(some, st.integers(1, 9), max_size=6)


with_alike = sizes.flatmap(lambda size: st.tuples(st.just(size), alike_among(max(2, size[0]))))


@settings(deadline=None, max_examples=30)
@given(with_alike)
def test_identical_replicas_change_neither_load_nor_survival(case):
    (nodes, replicas), alike = case
    placement, in_order = place_copies(nodes, replicas, alike), place_copies(nodes, replicas)
    assert sorted(node for group in placement.groups for node in group) == list(range(nodes))
    assert all(len(placement.kept_by(node)) == replicas for node in range(nodes))
    assert [survival(placement, lost) for lost in range(nodes)] == [survival(in_order, lost) for lost in range(nodes)]
    assert not_sent(placement, alike) >= not_sent(in_order, alike)


def unsent(holders, alike):
    """Bytes that copies need not send, counted copy by copy."""
    return sum(
        n for node, others in holders.items() for other in others for of, n in alike.items() if {node, other} <= of
    )


@each_row("nodes, replicas", [(4, 1), (5, 1), (6, 1)])
@settings(deadline=None, max_examples=4)
@given(st.data())
def test_no_equally_good_placement_sends_less(nodes, replicas, data):
    alike = data.draw(alike_among(nodes))
    ours = place_copies(nodes, replicas, alike)
    others = [h for h in placements(nodes, replicas) if is_balanced(h, replicas) and deadly(h) == deadly(ours.holders)]
    assert not_sent(ours, alike) == unsent(ours.holders, alike) == max(unsent(h, alike) for h in others)


@each_row("nodes, replicas", [(5, 3), (8, 1), (7, 1), (7, 2), (8, 2), (8, 3)])
@settings(deadline=None, max_examples=4)
@given(st.data())
def test_no_node_order_in_groups_and_ring_sends_less(nodes, replicas, data):
    alike = data.draw(alike_among(nodes))
    groups = place_copies(nodes, replicas).groups
    best = 0
    for order in islice(permutations(range(nodes)), 0, None, 7):
        renamed = {order[n]: [order[h] for h in hs] for n, hs in Placement(groups, replicas).holders.items()}
        best = max(best, unsent(renamed, alike))
    assert not_sent(place_copies(nodes, replicas, alike), alike) >= best


@each_row("nodes", [8, 64, 100])
def test_expert_replicas_keep_copies_for_each_other(nodes):
    """Of expert-parallel ranks on two nodes each, every other node holds the same experts."""
    alike = {frozenset(range(nodes)): 3} | {frozenset(range(first, nodes, 2)): 5 for first in (0, 1)}
    placement = place_copies(nodes, 1, alike)
    assert all((one - other) % 2 == 0 for one, other in placement.groups)
    assert not_sent(placement, alike) == nodes * 8 > not_sent(place_copies(nodes, 1), alike) == nodes * 3


def test_node_names_do_not_affect_survival():
    ours = place_copies(6, 2).holders
    for order in list(permutations(range(6)))[::97]:
        renamed = {order[n]: tuple(order[h] for h in holders) for n, holders in ours.items()}
        assert survived(renamed, 3) == survived(ours, 3)


def test_too_many_copies_are_refused():
    with pytest.raises(ValueError):
        place_copies(2, 2)


def test_placement_description_has_groups_survival_and_size():
    said = describe_placement(place_copies(5, 1), list("abcde"))
    assert "(a, b; c, d, e)" in said and "1 of 5" in said and "0.6" in said
    assert "1.5 GB" in describe_placement(place_copies(4, 1), list("abcd"), 1_500_000_000)
