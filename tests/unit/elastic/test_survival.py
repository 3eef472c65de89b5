"""The probability that a loss leaves a replica of each expert."""

import itertools
from math import comb, isclose

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.elastic.survival import (
    TooManyNodesError,
    count_survived,
    minimal_holder_sets,
    survival_lower_bound,
    survival_probability,
)


def tried(held, lost):
    """The share of all choices, by trying each."""
    nodes = held.shape[1]
    left = [numpy.setdiff1d(range(nodes), gone) for gone in itertools.combinations(range(nodes), lost)]
    return sum(bool(held[:, nodes].any(axis=1).all()) for nodes in left) / len(left)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 7), st.integers(1, 6), st.randoms(use_true_random=False))
def test_survival_probability_matches_enumeration(nodes, experts, rng):
    held = numpy.array([[rng.randint(0, 2) for _ in range(nodes)] for _ in range(experts)])
    for lost in range(nodes + 1):
        assert isclose(survival_probability(held, lost), tried(held, lost))
        assert survival_lower_bound(held, lost) <= survival_probability(held, lost) + 1e-12


def test_survival_probability_matches_manual_calculation():
    held = numpy.zeros((2, 10), int)
    held[0, :2] = held[1, 2:5] = 1
    assert survival_probability(held, 2) == 1 - 1 / 45  # of 45 pairs, only 0 and 1 take an expert with them
    assert survival_probability(held[:1], 10) == 0 == survival_probability(held[:1], 11)


def test_contiguous_holders_are_exact_for_any_number_of_nodes():
    rng = numpy.random.default_rng(0)
    for _ in range(8):
        nodes = 17
        held = numpy.zeros((8, nodes), int)
        for row in held:
            start = rng.integers(0, nodes - 3)
            row[start : start + rng.integers(2, 9)] = 1
        assert isclose(survival_probability(held, 3), tried(held, 3))
    pairs = numpy.kron(numpy.eye(50, dtype=int), [1, 1])
    assert count_survived(pairs, 3)[3] == comb(100, 3) - 50 * 98
    assert survival_probability(numpy.ones((4, 4096), int), 100) == 1


def test_other_holders_have_lower_bound_if_not_enumerable():
    held = numpy.zeros((1, 20), int)
    held[0, [0, 5]] = 1
    assert survival_probability(held, 1) == 1
    with pytest.raises(TooManyNodesError):
        survival_probability(held, 2)
    assert survival_lower_bound(held, 2) == 1 - 1 / 190


def test_only_minimal_holder_sets_count():
    held = numpy.array([[1, 1, 0, 0], [2, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]])
    assert minimal_holder_sets(held).astype(int).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
