"""The formula, and intervals that are best by it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.simulate.closed_form import at_interval, best_interval, capped_interval, expected_ettr, recovery_s
from moc.simulate.policies import POLICIES, Options
from moc.simulate.policy_costs import SimulatedCosts
from tests.cases import each_row
from tests.errors import raises
from tests.unit.simulate.setups import small_setup


def test_expected_ettr_matches_formula_of_section_2_4():
    saving = SimulatedCosts("full", interval=20, stall_s=6, replay_s=3)
    expected = 1 / (1 + 6 / (3 * 20)) / (1 + 0.5 * 20 * 3 / 600)
    assert expected_ettr(saving, 3, 600) == pytest.approx(expected)
    assert expected_ettr(saving, 3, math.inf) == pytest.approx(1 / 1.1)


def test_sparse_recovery_takes_one_and_a_half_windows():
    assert recovery_s(SimulatedCosts("sparse", 6, lag=6, replay_s=2)) == 1.5 * 6 * 2


@settings(deadline=None)
@given(st.floats(0.1, 60), st.floats(0.5, 10), st.floats(120, 1e5), st.floats(0, 600))
def test_best_interval_is_optimal_and_near_young(stall_s, iteration_s, mtbf_s, restart_s):
    saving = SimulatedCosts("full", 1, stall_s, restart_s=restart_s, replay_s=iteration_s + stall_s)
    best = best_interval(saving, iteration_s, mtbf_s)

    def ettr(interval):
        return expected_ettr(at_interval(saving, interval, iteration_s), iteration_s, mtbf_s)

    for other in (1, best // 2, best - 1, best + 1, 2 * best, 10 * best):
        assert other < 1 or ettr(other) <= ettr(best) + 1e-12
    young = math.sqrt(2 * stall_s * mtbf_s) / iteration_s
    if young > 20 and restart_s < mtbf_s / 10:
        assert young / 1.2 < best < 1.2 * young


def test_interval_is_not_shorter_than_checkpoint_time():
    saving = SimulatedCosts("full", 1, 0.0, replay_s=1)
    assert best_interval(saving, 1, 600, at_least=7) == 7
    with raises("interval-unlimited"):
        best_interval(saving, 1, math.inf)


def test_interval_respects_overhead_cap():
    interval = capped_interval(stall_s=9, iteration_s=3, cap=0.03)
    assert interval == 100 and 9 / (99 * 3) > 0.03 >= 9 / (100 * 3)
    assert capped_interval(0, 3, 0.03, at_least=14) == 14
    with raises("value-out-of-range"):
        capped_interval(9, 3, 0)


@each_row("change", [{"interval": 0}, {"lag": -1}, {"stall_s": -1}, {"restart_s": math.nan}], ids=str)
def test_invalid_policy_costs_are_refused(change):
    with pytest.raises(ValueError, match="full: "):
        SimulatedCosts("full", **change)


@given(st.integers(0, 40), st.floats(0.1, 5), st.floats(0.1, 5), st.floats(0, 300))
def test_replayed_iterations_and_seconds_agree(conversion, conversion_s, replay_s, iterations):
    saving = SimulatedCosts("sparse", 10, replay_s=replay_s, conversion_s=conversion_s, conversion=conversion)
    assert saving.replayed(saving.replay_total_s(iterations)) == pytest.approx(iterations, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(set(POLICIES) - {"none"})),
    iteration_s=st.floats(0.5, 10),
    snapshot_s=st.floats(0.2, 60),
    mtbf_s=st.floats(60, 1e5),
    rarer=st.floats(1, 100),
)
def test_expected_cost_decreases_with_rarer_failures(name, iteration_s, snapshot_s, mtbf_s, rarer):
    setup = small_setup(iteration_s, snapshot_s)

    def ettr(chosen_for_s, mtbf_s):
        saving = POLICIES[name](setup, Options(mtbf_s=chosen_for_s)).saving
        return expected_ettr(saving, iteration_s, mtbf_s)

    often, seldom = ettr(mtbf_s, mtbf_s), ettr(mtbf_s * rarer, mtbf_s * rarer)
    assert 0 < often <= seldom + 1e-9 <= 1 + 1e-9
    assert ettr(mtbf_s, mtbf_s * rarer) <= seldom + 1e-9  # an interval for other failures is not better
    overhead = POLICIES[name](setup, Options(mtbf_s=mtbf_s)).saving.per_iteration_s() / iteration_s
    assert ettr(mtbf_s, math.inf) == pytest.approx(1 / (1 + overhead))
