"""Budgets of selective snapshots: what was measured, and when they follow it."""

import json

from moc.policy import Observed, Transfer
from moc.policy.interval import BLOCK, WARM_UP
from moc.policy.pec_tuner import PecTuner, TuningLimits
from moc.policy.selective_tuner import SelectiveTuner
from tests.errors import raises


def observe(tuner, number=1, seconds=1.0, **seen):
    for _ in range(number):
        tuner.observe(Observed(2 * seconds, forward_backward_s=seconds, **seen))
    return tuner


def test_nothing_is_due_before_iterations_and_the_cost_of_the_first_snapshot_are_measured():
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK - 1)
    assert not tuner.due(14) and tuner.local is None and tuner.stretched(9.0) == 1
    observe(tuner)
    assert tuner.due(15) and not tuner.due(0) and tuner.remote("peers") is None
    observe(tuner, started=True, busy=True)
    assert not tuner.due(16)
    observe(tuner, busy=True, copied=Transfer(80.0, 2.0))
    assert tuner.due(17) and tuner.local == 40.0


def test_a_first_snapshot_whose_cost_nobody_told_is_not_waited_for_once_it_is_safe():
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK)
    observe(tuner, started=True, busy=True)
    assert not tuner.due(17)
    observe(tuner)
    assert tuner.due(18)


def test_every_nth_iteration_is_due():
    tuner = observe(SelectiveTuner(3), WARM_UP + BLOCK)
    assert [iteration for iteration in range(15, 25) if tuner.due(iteration)] == [15, 18, 21, 24]


def test_budgets_are_what_moves_unnoticed():
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK, seconds=2.0)
    observe(tuner, seconds=2.0, copied=Transfer(80.0, 2.0), replicated=Transfer(30.0, 1.0), written=Transfer(7.0, 1.0))
    assert tuner.local == 80.0  # forward and backward
    assert (tuner.remote("peers"), tuner.remote("disk"), tuner.remote("memory")) == (120.0, 28.0, None)  # an iteration
    assert tuner.stretched(80.0) == 1 and tuner.stretched(89.6) == 2  # 0.24 s, of at most 3 % of 4 s


def test_in_bubbles_as_much_as_they_have_time_for():
    """By the estimate until they are timed; only what does not hide beside the computation either stalls training."""
    tuner = observe(SelectiveTuner(bubble_share=0.25), WARM_UP + BLOCK, seconds=2.0)
    observe(tuner, seconds=2.0, copied=Transfer(80.0, 2.0))
    assert tuner.local == 20.0
    assert tuner.stretched(80.0) == 1 and tuner.stretched(89.6) == 2
    observe(tuner, BLOCK, seconds=2.0, bubble_s=0.75)
    assert tuner.local == 30.0
    compute = SelectiveTuner()
    compute.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    assert compute.local == 80.0
    resumed = SelectiveTuner(bubble_share=0.25)
    resumed.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    assert resumed.local == 30.0


def test_budgets_follow_measurements_that_change_by_a_tenth():
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK)
    observe(tuner, copied=Transfer(100.0, 1.0))
    observe(tuner, 5, copied=Transfer(105.0, 1.0))
    assert tuner.local == 100.0
    observe(tuner, BLOCK, copied=Transfer(120.0, 1.0))
    assert tuner.local == 112.5  # the first median that is a tenth away; 120 is not, from there


def test_a_resumed_run_has_the_same_budgets():
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK)
    observe(tuner, copied=Transfer(100.0, 1.0))
    observe(tuner, 5, copied=Transfer(105.0, 1.0))
    other = SelectiveTuner()
    other.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    assert other.local == 100.0 and other.due(1) and other.state_dict() == tuner.state_dict()


def test_another_tuners_state_is_ignored_and_a_damaged_one_refused():
    tuner = observe(SelectiveTuner(), WARM_UP + BLOCK, copied=Transfer(100.0, 1.0))
    state = tuner.state_dict()
    tuner.load_state_dict(PecTuner(TuningLimits(0.1), 1.0).state_dict())
    assert tuner.local is None and not tuner.due(1)
    for damaged in ([], state | {"copied": 3}, state | {"faults": "many"}):
        with raises("saved-state-invalid"):
            tuner.load_state_dict(damaged)
