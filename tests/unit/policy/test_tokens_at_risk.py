"""Tokens at risk: loads replayed through the rules of selective snapshots."""

import pytest

from moc.policy.expert_selection import count_limit, lost_tokens_by_layer
from moc.policy.tokens_at_risk import (
    TokensAtRisk,
    experts_in_turn,
    replay_loads,
    risk_by_share,
    selection_rules,
    steady_risk_per_layer,
)
from tests.errors import raises

PLACES = [(0, 0), (0, 1)]


def test_momentary_lost_tokens_count_per_layer_iteration():
    assert lost_tokens_by_layer({0: [3, 2], 1: [0, 4], 2: [0, 0]}, {0: 10.0, 1: 2.0, 2: 0.0}) == [0.5, 2.0]


def test_rotation_saves_experts_equally_with_fractional_counts():
    table = {1: [0, 0], 2: [0, 0]}
    assert [experts_in_turn(table, 3, snapshot) for snapshot in range(2)] == [{1: [0, 1], 2: [0]}, {1: [0], 2: [0, 1]}]
    assert experts_in_turn(table, 9, 5) == {1: [0, 1], 2: [0, 1]} and experts_in_turn(table, 0, 5) == {1: [], 2: []}


def test_replayed_loads_give_momentary_lost_tokens():
    """Ten tokens an iteration, of which the expert that waits has had 4, 6, 4, 6."""
    loads = [{0: [6, 4]}] * 4
    limits = [count_limit(PLACES, 1)]
    found = replay_loads(loads, selection_rules(limits, 99)["in turn"])
    assert found == TokensAtRisk(mlt=pytest.approx(0.5), mlt_per_layer=pytest.approx(0.5), oldest=2)
    assert replay_loads(loads, selection_rules(limits, 99)["in turn"], skipped=3).mlt == pytest.approx(0.6)
    assert replay_loads(loads, selection_rules(limits, 99)["in turn"], interval=2).mlt == pytest.approx(
        1.0
    )  # 8, then 12
    with raises("interval-invalid", "3"):
        replay_loads(loads, selection_rules(limits, 99)["in turn"], interval=3, skipped=3)


def test_selection_rules_differ_if_one_expert_is_busy():
    """Of 9 and 1 tokens, tokens alone choose the other one when it has had 10 of them, tokens times age earlier."""
    loads = [{0: [9, 1]}] * 60
    chosen = selection_rules([count_limit(PLACES, 1)], 999)
    oldest = {name: replay_loads(loads, choose).oldest for name, choose in chosen.items()}
    assert list(oldest.values()) == [4, 4, 10, 10, 2]  # 9 * (1 + 1) < 4 * (4 + 1); 9 < 10; in turn


def test_momentary_lost_tokens_are_summed_and_averaged():
    loads = [{0: [6, 4], 1: [3, 2]}] * 8
    found = replay_loads(loads, lambda unsaved, ages, snapshot: {0: [0], 1: [0, 1]})
    assert found.mlt == pytest.approx(0.4 * 4.5) and found.mlt_per_layer == found.mlt / 2


def test_equally_busy_experts_wait_half_a_cycle():
    loads = [{0: [7, 7, 7, 7], 1: [5, 5, 5, 5]}]
    assert steady_risk_per_layer(loads, 2) == pytest.approx((4 - 1) / 2)
    assert steady_risk_per_layer(loads, 2, interval=10) == pytest.approx(10 * (4 - 1) / 2)


def test_risk_decreases_with_share_of_saved_experts():
    equal, skewed = (
        risk_by_share([{0: [5] * 8, 1: [7] * 8}]),
        risk_by_share([{0: [90, 2, 2, 2, 1, 1, 1, 1], 1: [5] * 8}]),
    )
    assert equal(0.25, 1.0) == pytest.approx((4 - 1) / 2) and equal(1.0, 1.0) == 0.0
    assert skewed(0.25, 1.0) < 0.8 * equal(0.25, 1.0)
    assert (
        risk_by_share([]) is None and risk_by_share([{0: [5, 5], 1: [0, 0]}]) is None
    )  # of no use before anything is counted
