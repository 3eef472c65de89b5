"""Which replica computes which tokens."""

import numpy

from moc.elastic.allocation import allocate_distinct
from moc.elastic.dispatch import even_capacities, exchange_of_rank, level_capacities, water_fill
from moc.elastic.placement import place_replicas, replicas_by_node, without_repetition
from tests.cases import each_row


def some(rng, experts, ranks):
    """Counts and replicas; some experts, and some ranks, have no tokens."""
    counts = rng.integers(0, rng.choice([2, 10, 1000]), (experts, ranks))
    counts *= rng.integers(0, 2, (experts, 1)) * rng.integers(0, 2, (1, ranks))
    replicas = rng.integers(0, 3, (experts, ranks))
    replicas[numpy.arange(experts), rng.integers(0, ranks, experts)] += 1
    return counts, replicas


@each_row("capacities", [level_capacities, even_capacities])
def test_every_token_is_computed_once_by_replica_holder(capacities):
    rng = numpy.random.default_rng(0)
    for _ in range(200):
        experts, ranks = 50, int(rng.integers(1, 9))
        counts, replicas = some(rng, experts, ranks)
        given = capacities(counts.sum(axis=1), replicas)
        assert (given.sum(axis=1) == counts.sum(axis=1)).all()
        assert (given >= 0).all() and not given[replicas == 0].any()
        parts = [exchange_of_rank(counts, given, rank) for rank in range(ranks)]
        sends = numpy.stack([part.sends for part in parts])  # by sender, expert, receiver
        receives = numpy.stack([part.receives for part in parts])  # by receiver, expert, sender
        assert (sends >= 0).all()
        assert (sends == receives.transpose(2, 1, 0)).all()
        assert (sends.sum(axis=2).T == counts).all()
        assert (sends.sum(axis=0) == given).all()
        own = numpy.stack([sends[rank, :, rank] for rank in range(ranks)], axis=1)
        assert (own == numpy.minimum(counts, given)).all()
        assert ((sends > 0).sum(axis=(0, 2)) <= 2 * ranks - 1).all()


def test_least_loaded_ranks_are_filled_first():
    assert water_fill([5, 0, 2], 4) == [0, 3, 1]
    assert water_fill([5, 0, 2], 10) == [0, 6, 4]
    assert water_fill([1, 0, 0, 1], 5) == [1, 2, 2, 0]  # equal loads: the lower rank first
    rng = numpy.random.default_rng(0)
    for _ in range(1_000):
        loads, amount = rng.integers(0, 20, rng.integers(1, 9)), int(rng.integers(0, 60))
        more = numpy.array(water_fill(loads.tolist(), amount))
        assert more.sum() == amount and (more >= 0).all()
        filled = (loads + more)[more > 0]
        if amount:
            assert filled.max() - filled.min() <= 1
            assert (loads[more == 0] >= filled.max() - 1).all()


def test_hot_expert_is_shared_and_level_compensates_cold_ones():
    tokens = numpy.array([0, 30, 90])
    replicas = numpy.array([[1, 0, 0], [1, 0, 0], [1, 1, 1]])
    assert level_capacities(tokens, replicas).tolist() == [[0, 0, 0], [30, 0, 0], [10, 40, 40]]
    assert even_capacities(tokens, replicas).tolist() == [[0, 0, 0], [30, 0, 0], [30, 30, 30]]


def test_level_includes_existing_load_of_ranks():
    assert level_capacities(numpy.array([6]), numpy.array([[1, 1]]), numpy.array([4, 0])).tolist() == [[1, 5]]


def test_hottest_expert_on_all_ranks_levels_load():
    loads = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987]
    replicas = allocate_distinct(loads, 10, 6, 2, everywhere=1)
    table = without_repetition(place_replicas(replicas, 10, 6, [15]), range(15, -1, -1))
    work = level_capacities(numpy.array(loads), replicas_by_node(table, 16)).sum(axis=0)
    assert work.max() <= 1.01 * work.mean()
