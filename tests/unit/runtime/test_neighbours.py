"""The order in which neighbours in a ring connect."""

import graphlib

import pytest

from moc.runtime.generation import neighbours


@pytest.mark.parametrize("size", range(3, 18))
def test_no_circle_of_ranks_waits_for_each_other(size):
    before = {}  # by pair, the pairs that must be connected first
    for rank in range(size):
        peers = neighbours(rank, size)
        assert sorted(peers) == sorted({(rank - 1) % size, (rank + 1) % size})
        first, second = (frozenset((rank, peer)) for peer in peers)
        before.setdefault(second, set()).add(first)
    sorter = graphlib.TopologicalSorter(before)
    sorter.prepare()  # raises CycleError
    rounds = 0
    while sorter.is_active():
        sorter.done(*sorter.get_ready())
        rounds += 1
    assert rounds <= 3
