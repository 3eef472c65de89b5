"""The interval: as short as the budget allows, measured, and the same on every rank."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.policy import Every, IntervalTuner, ObservedIteration, Transfer, parse_interval
from moc.policy.interval import (
    BLOCK,
    BLOCKS,
    PROFILE_BLOCKS,
    REFRESH,
    SNAPSHOTS,
    UNDISTURBED_MTBF_S,
    WARM_UP,
    Measurements,
)
from tests.cases import each_row
from tests.errors import raises
from tests.unit.policy.clock import Clock

BUDGETS = st.sampled_from([0.01, 0.03, 0.1])
seconds = st.floats(0.001, 1000)
observations = st.lists(
    st.tuples(seconds, st.one_of(st.just(0.0), seconds), st.booleans(), st.booleans()), max_size=400
)


@st.composite
def clocks(draw):
    """Cheap and dear snapshots, over in less than an iteration or after a hundred."""
    iteration_s = draw(st.floats(0.1, 10))
    return Clock(
        IntervalTuner(draw(BUDGETS)),
        iteration_s,
        stall_s=iteration_s * draw(st.sampled_from([0, 0.01, 0.1, 1, 3])),
        persist_s=iteration_s * draw(st.sampled_from([0, 0.5, 3, 20, 100])),
        slowdown=draw(st.sampled_from([0, 0.02, 0.2])),
        noise=draw(st.sampled_from([0, 0.01])),
    )


def ideal(clock):
    """The shortest interval whose overhead is within the budget, and at which the one before is persisted."""
    flight = max(1, math.ceil((clock.persist_s - clock.stall_s) / (clock.iteration_s * (1 + clock.slowdown))))
    # The slowdown lasts until the snapshot is persisted, for which its stall is time too.
    disturbed_s = max(0.0, clock.persist_s - clock.stall_s) / (1 + clock.slowdown)
    cost = clock.stall_s + clock.slowdown * disturbed_s
    return max(flight, math.ceil(cost / (clock.interval.budget * clock.iteration_s)))


def close(interval, clock):
    wanted = ideal(clock)
    # An iteration in which the snapshot ends counts as a whole; so d and C may be larger by a part of one.
    return abs(interval - wanted) <= 1 + 0.1 * wanted + clock.slowdown / clock.interval.budget


def settled(**costs):
    clock = Clock(IntervalTuner(0.03), **costs).snapshots(SNAPSHOTS)
    assert clock.interval.is_settled and close(clock.interval.interval, clock)
    return clock


@settings(max_examples=60, deadline=None)
@given(clocks())
def test_steady_overhead_is_within_budget(clock):
    clock.snapshots(SNAPSHOTS)
    before, clock.lost_s = clock.starts[-1], 0.0
    clock.snapshots(8)
    overhead = clock.lost_s / ((clock.starts[-1] - before) * clock.iteration_s)
    noise = 3 * clock.noise / math.sqrt(BLOCK)
    assert overhead <= clock.interval.budget * 1.05 + noise


@settings(max_examples=60, deadline=None)
@given(clocks())
def test_interval_is_shortest_within_budget(clock):
    clock.snapshots(SNAPSHOTS + 2)
    assert close(clock.interval.interval, clock)
    assert clock.interval.overhead <= clock.interval.budget * (1 + 1e-9)
    gaps = [
        after - before for before, after in zip(clock.starts[SNAPSHOTS:], clock.starts[SNAPSHOTS + 1 :], strict=False)
    ]
    assert all(gap <= ideal(clock) * 1.1 + 2 + BLOCK + clock.slowdown / clock.interval.budget for gap in gaps)


@given(observations, BUDGETS)
def test_interval_is_positive_for_any_measurement(measured, budget):
    tuner = IntervalTuner(budget)
    for iteration, (iteration_s, stall_s, snapshot, busy) in enumerate(measured, 1):
        tuner.observe(ObservedIteration(iteration_s, stall_s, snapshot, busy))
        assert isinstance(tuner.interval, int) and tuner.interval >= 1
        assert not (busy and tuner.is_due(iteration))


@given(observations, BUDGETS, st.data())
def test_ranks_with_same_observations_have_same_interval(measured, budget, data):
    tuners = [IntervalTuner(budget) for _ in range(3)]
    for iteration, observation in enumerate(measured, 1):
        for tuner in tuners:
            tuner.observe(ObservedIteration(*observation))
        # How often one asks makes no difference.
        for _ in range(data.draw(st.integers(0, 3))):
            tuners[0].is_due(iteration), tuners[0].interval, tuners[0].state_dict()
        assert len({(tuner.is_due(iteration), tuner.interval, tuner.overhead) for tuner in tuners}) == 1


@given(observations, observations, BUDGETS)
def test_state_survives_json_and_synchronizes_ranks(before, after, budget):
    survivor, replacement = IntervalTuner(budget), IntervalTuner(budget)
    for observation in before:
        survivor.observe(ObservedIteration(*observation))
    state = json.loads(json.dumps(survivor.state_dict()))
    was = survivor.interval, survivor.iteration_s, survivor.snapshot_s
    for tuner in (survivor, replacement):
        tuner.load_state_dict(state)
        assert tuner.state_dict() == state
        assert (tuner.interval, tuner.iteration_s, tuner.snapshot_s) == was
    for iteration, observation in enumerate(after):
        for tuner in (survivor, replacement):
            tuner.observe(ObservedIteration(*observation))
        assert survivor.is_due(iteration) == replacement.is_due(iteration)
        assert survivor.state_dict() == replacement.state_dict()


def test_resumed_run_keeps_interval():
    clock = settled(stall_s=1.5)
    resumed = Clock(IntervalTuner(0.03), stall_s=1.5)
    resumed.interval.load_state_dict(clock.interval.state_dict())
    assert resumed.interval.is_settled
    resumed.snapshots(2)
    assert resumed.starts == [50, 100]


def test_nothing_is_saved_before_iterations_are_measured():
    clock = Clock(IntervalTuner(), stall_s=2).snapshots(SNAPSHOTS)
    assert clock.starts[0] == WARM_UP + PROFILE_BLOCKS * BLOCK
    assert [b - a for a, b in zip(clock.starts, clock.starts[1:], strict=False)] == [BLOCK + 1, BLOCK + 1]


@each_row("dear, cheap", [({"stall_s": 6}, {"stall_s": 0.6}), ({"persist_s": 90}, {"persist_s": 3})])
@each_row("upwards", [True, False])
def test_lasting_cost_change_counts_from_second_snapshot(dear, cheap, upwards):
    first, then = (cheap, dear) if upwards else (dear, cheap)
    clock = settled(**first)
    clock.snapshots(3)
    was = clock.interval.interval
    for name, value in then.items():
        setattr(clock, name, value)
    clock.snapshots(2)
    assert close(clock.interval.interval, clock)
    assert (clock.interval.interval > 2 * was) if upwards else (2 * clock.interval.interval < was)


@each_row("factor", [0.25, 4])
@each_row("costs", [{"stall_s": 1.0}, {"persist_s": 30.0}, {"persist_s": 30.0, "slowdown": 0.1}])
def test_lasting_change_of_iteration_time_is_followed(factor, costs):
    clock = settled(**costs)
    clock.iteration_s *= factor
    clock.run(BLOCKS * REFRESH + 5 * ideal(clock)).snapshots(1)
    assert clock.interval.iteration_s == pytest.approx(clock.iteration_s)
    assert close(clock.interval.interval, clock)


@each_row("hiccup", [range(0, 1), range(20, 21), range(3, 5)])
def test_temporary_slowdown_does_not_count(hiccup):
    clock = settled(stall_s=0.9, persist_s=8, slowdown=0.05)
    clock.snapshots(2)
    was = clock.interval.interval
    clock.run(60, dict.fromkeys(hiccup, 500.0)).snapshots(1)
    assert abs(clock.interval.interval - was) <= 1


def test_one_slow_snapshot_does_not_count():
    clock = settled(stall_s=0.9)
    was = clock.interval.interval
    clock.stall_s = 300.0
    clock.snapshots(1)
    assert clock.interval.interval == was
    clock.stall_s = 0.9
    clock.snapshots(1)
    assert clock.interval.interval == was


def test_slowdown_in_bursts_counts():
    """Two of twenty iterations in flight take 4 s in place of 1: 6 s that no median of iterations would show."""
    tuner, since = IntervalTuner(0.03), None
    for iteration in range(2000):
        flight = since is not None and since < 20
        slow = flight and since in (5, 6)
        tuner.observe(ObservedIteration(4.0 if slow else 1.0, 0.0, since == 0, flight and since < 19))
        since = None if since is None else since + 1
        if tuner.is_due(iteration):
            since = 0
    assert tuner.snapshot_s == pytest.approx(6.0) and tuner.interval == 200


def test_stall_after_snapshot_counts():
    tuner, since = IntervalTuner(0.03), None
    for iteration in range(1000):
        stall = 1.5 if since == 1 else 0.0
        tuner.observe(ObservedIteration(1.0 + stall, stall, since == 0))
        since = None if since is None else since + 1
        if tuner.is_due(iteration):
            since = 0
    assert tuner.interval == 50


def test_shorter_iterations_do_not_hide_a_stall():
    clock = settled(stall_s=1.5, persist_s=45)
    clock.iteration_s = 0.9
    clock.snapshots(3)
    assert clock.interval.snapshot_s == pytest.approx(1.5)


def test_free_snapshots_are_taken_in_every_iteration():
    clock = settled()
    before = len(clock.starts)
    clock.run(10 * REFRESH)
    assert clock.interval.interval == 1
    assert len(clock.starts) - before > 0.9 * 10 * REFRESH
    waits = [a for a, b in zip(clock.starts, clock.starts[1:], strict=False) if b - a > 1][SNAPSHOTS - 1 :]
    assert waits == list(range(clock.starts[SNAPSHOTS - 1] + REFRESH - 1, clock.starts[-1], REFRESH + BLOCK))


def test_unplanned_snapshot_is_measured():
    tuner = IntervalTuner(0.03)
    for iteration in range(100):
        started = iteration % 20 == 0
        tuner.observe(ObservedIteration(1.0 + started, float(started), started))
    assert tuner.is_settled and tuner.interval == 34


def test_overtaken_snapshot_is_not_measured():
    clock = settled(stall_s=0.9)
    was = clock.interval.state_dict()
    for _ in range(SNAPSHOTS + 1):
        clock.interval.observe(ObservedIteration(100.0, 99.0, snapshot_started=True, snapshot_pending=True))
    assert clock.interval.state_dict()["snapshots"] == was["snapshots"][-SNAPSHOTS:]


@each_row("budget", [0, -0.03, math.nan, math.inf])
def test_budget_must_be_positive(budget):
    with raises("value-out-of-range"):
        IntervalTuner(budget)


@each_row("iteration_s, stall_s", [(0, 0), (-1, 0), (1, -1), (math.nan, 0), (1, math.nan), (math.inf, 0)])
def test_impossible_times_are_refused(iteration_s, stall_s):
    with raises("value-out-of-range"):
        IntervalTuner().observe(ObservedIteration(iteration_s, stall_s))


@each_row(
    "state",
    [[], {"iteration_s": 1.0}, {"iteration_s": [0.0], "snapshots": []}, {"iteration_s": [1.0], "snapshots": [3]}],
)
def test_invalid_saved_state_is_refused_without_change(state):
    clock = settled(stall_s=1.5)
    was = clock.interval.state_dict()
    with raises("saved-state-invalid"):
        clock.interval.load_state_dict(state)
    assert clock.interval.state_dict() == was


def test_fixed_interval_is_due_at_multiples():
    every = Every(5)
    every.observe(ObservedIteration(1.0, 100.0, snapshot_started=True, snapshot_pending=True))
    assert [iteration for iteration in range(16) if every.is_due(iteration)] == [5, 10, 15]
    every.load_state_dict(every.state_dict())


def test_interval_is_parsed_from_flag():
    assert parse_interval("7") == Every(7)
    assert parse_interval("auto", 0.05).budget == 0.05


@each_row("text", ["0", "-3", "1.5", ""])
def test_impossible_intervals_are_refused(text):
    with raises("interval-invalid", text):
        parse_interval(text)


def measured(iterations, seen):
    found = Measurements()
    for _ in range(iterations):
        found.observe(seen)
    return found


def test_measured_times_exclude_stalls_and_give_rates():
    seen = ObservedIteration(
        3.0, stall_s=1.0, forward_backward_s=1.5, copied=Transfer(80.0, 2.0), written=Transfer(80.0, 8.0)
    )
    found = measured(WARM_UP + BLOCK, seen)
    assert found.medians == {"iteration_s": 2.0, "forward_backward_s": 1.5, "copy_rate": 40.0, "write_rate": 10.0}
    assert found.trained_s == 3.0 * (WARM_UP + BLOCK)
    for unknown in (
        ObservedIteration(2.0),
        ObservedIteration(2.0, copied=Transfer(80.0, 0.0), written=Transfer(0.0, 8.0)),
    ):
        for _ in range(BLOCK + 1):  # what took no time, or had no bytes, tells nothing
            found.observe(unknown)
    assert found.medians == {"iteration_s": 2.0, "forward_backward_s": 1.5, "copy_rate": 40.0, "write_rate": 10.0}


def test_first_iterations_and_one_outlier_do_not_count():
    found = measured(WARM_UP, ObservedIteration(100.0, forward_backward_s=90.0))
    assert not found.medians
    for _ in range(BLOCK - 1):
        found.observe(ObservedIteration(2.0, forward_backward_s=1.0))
    assert not found.medians  # not before there is a block of them
    found = measured(WARM_UP, ObservedIteration(100.0, forward_backward_s=90.0))
    for seconds in (*(2.0,) * BLOCK, 50.0):
        found.observe(ObservedIteration(seconds, forward_backward_s=0.5 * seconds))
    assert found.medians == {"iteration_s": 2.0, "forward_backward_s": 1.0}


def test_old_measurements_are_forgotten():
    found = measured(WARM_UP + BLOCK, ObservedIteration(1.0, forward_backward_s=1.0, replicated=Transfer(1.0, 1.0)))
    for _ in range(BLOCK * BLOCKS):
        found.observe(ObservedIteration(4.0, forward_backward_s=3.0, replicated=Transfer(6.0, 1.0)))
    assert found.medians == {"iteration_s": 4.0, "forward_backward_s": 3.0, "replicate_rate": 6.0}


def test_timed_bubbles_are_measured():
    found = measured(WARM_UP + BLOCK, ObservedIteration(4.0, forward_backward_s=3.0))
    assert "bubble_s" not in found.medians and "bubble_s" not in found.state_dict()
    for _ in range(BLOCK):
        found.observe(ObservedIteration(4.0, forward_backward_s=3.0, bubble_s=1.0))
    assert found.medians["bubble_s"] == 1.0
    again = Measurements.from_state(json.loads(json.dumps(found.state_dict())))
    assert again.medians == found.medians


def test_faults_shorten_expected_mtbf():
    found = Measurements()
    assert found.mtbf_s == UNDISTURBED_MTBF_S
    found.trained_s, found.faults = 36_000.0, 9
    assert found.mtbf_s == (UNDISTURBED_MTBF_S + 36_000) / 10
    found.trained_s, found.faults = 1e9, 1000
    assert found.mtbf_s == pytest.approx(1e6, rel=0.01)


def test_measurements_survive_json():
    found = measured(WARM_UP + BLOCK + 3, ObservedIteration(3.0, forward_backward_s=2.0, written=Transfer(5.0, 2.0)))
    found.faults = 2
    again = Measurements.from_state(json.loads(json.dumps(found.state_dict())))
    assert again.state_dict() == found.state_dict() and again.medians == found.medians
    for _ in range(WARM_UP):
        again.observe(ObservedIteration(99.0, forward_backward_s=98.0))
    assert again.medians == found.medians
    with raises("saved-state-invalid"):
        Measurements.from_state({"trained_s": 1.0})
