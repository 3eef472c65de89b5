"""Turns of jobs that are compared with each other."""

from collections import Counter
from itertools import pairwise

from benchmarks.common import rotated
from tests.cases import each_row


@each_row("names", ["ab", "abc", "abcd"])
def test_jobs_take_every_position_equally_often(names):
    orders = [rotated(names, number) for number in range(2 * len(names))]
    assert all(sorted(order) == list(names) for order in orders)
    assert set(Counter(place for order in orders for place in enumerate(order)).values()) == {2}
    after = Counter(pair for order in orders for pair in pairwise(order))
    assert all(after[one, other] == after[other, one] for one, other in after)
