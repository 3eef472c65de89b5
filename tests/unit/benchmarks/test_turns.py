"""Turns of jobs that are compared with each other."""

from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.common import rotated
from benchmarks.train_overhead import by_turns, ratio


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_no_place_in_a_round_is_anybodys_own(names):
    orders = [rotated(names, number) for number in range(2 * len(names))]
    assert all(sorted(order) == list(names) for order in orders)
    assert set(Counter(place for order in orders for place in enumerate(order)).values()) == {2}
    after = Counter(pair for order in orders for pair in pairwise(order))
    assert all(after[one, other] == after[other, one] for one, other in after)


def test_seconds_are_those_of_the_loop_whose_turn_it_was():
    clocks = {name: iter(range(first, 99, 10)) for first, name in enumerate("abc", start=1)}
    seconds = by_turns({name: lambda _, clock=clock: next(clock) for name, clock in clocks.items()}, 3, 1)
    assert seconds == {"a": [1, 11, 21], "b": [2, 12, 22], "c": [3, 13, 23]}
    assert ratio(seconds, "b", "a") == {"min": 1 / 2, "median": 11 / 12, "max": 21 / 22}
