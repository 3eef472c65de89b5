"""How much experts have to do, and how unequally."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moc.policy.popularity import decayed, frequencies, has_changed, hhi, relative, skew_gauges, skewness
from tests.errors import raises


def test_skewness_is_0_where_all_are_equal_and_1_where_one_has_everything():
    assert hhi([5, 5, 5, 5]) == pytest.approx(1 / 4) and skewness([5, 5, 5, 5]) == pytest.approx(0)
    assert hhi([0, 0, 7, 0]) == 1 and skewness([0, 0, 7, 0]) == 1


def test_skewness_by_hand():
    assert hhi([3, 1]) == pytest.approx(9 / 16 + 1 / 16)
    assert skewness([3, 1]) == pytest.approx((10 / 16 - 1 / 2) / (1 / 2))


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=64).filter(any))
def test_skewness_is_a_share(counts):
    assert -1e-9 <= skewness(counts) <= 1 + 1e-9


@pytest.mark.parametrize("counts", [[], [4], [0, 0]])
def test_no_skewness(counts):
    with raises("counts-misfit"):
        skewness(counts)


def test_gauges_are_means_over_layers_with_tokens():
    assert skew_gauges({0: [1, 1], 1: [2, 0], 2: [0, 0], 3: [7]}) == {"hhi": 0.75, "skewness": 0.5}
    assert skew_gauges({}) == {} == skew_gauges({0: [0, 0]})


def test_a_change_of_more_than_10_percent_of_25_percent_of_experts():
    before = frequencies({0: [100, 100, 100, 100], 1: [100, 100, 100, 100]})
    assert not has_changed(before, before)
    two = frequencies({0: [112, 88, 100, 100], 1: [100, 100, 100, 100]})
    assert has_changed(before, two)
    assert not has_changed(before, frequencies({0: [110, 90, 100, 100], 1: [100, 100, 100, 100]}))
    one = {0: [0.25 * 1.2, 0.25, 0.25, 0.25], 1: [0.25] * 4}
    assert not has_changed(before, one)
    assert not has_changed({}, {})


@pytest.mark.parametrize(
    ("now", "changed"),
    [
        ([11.0, 9.0, 10.0, 10.0], False),  # by 10 % and no more
        ([11.5, 10.0, 10.0, 10.0], True),  # one of four is 25 %
        ([8.5, 10.0, 10.0, 10.0], True),
        ([11.5, 10.0, 10.0, 10.0, 10.0], False),
    ],
)
def test_the_limits_of_a_change(now, changed):
    assert has_changed({0: [10.0] * len(now)}, {0: now}) == changed
    nothing = {0: [0.0] * len(now)}
    assert not has_changed(nothing, nothing) and has_changed(nothing, {0: now})


def test_frequencies_are_shares_of_a_layer():
    assert frequencies({0: [1, 3], 1: [0, 0]}) == {0: [0.25, 0.75], 1: [0.0, 0.0]}


def test_decayed_popularity_forgets():
    first = decayed({}, {0: [100, 0]}, alpha=0.9)
    assert first == {0: [pytest.approx(10.0), 0.0]}
    assert decayed(first, {0: [0, 20]}, alpha=0.9) == {0: [pytest.approx(9.0), pytest.approx(2.0)]}


def test_popularity_for_each_capacity():
    assert relative({0: [6, 6]}, {0: (3, 1)}) == {0: [2, 6]}
