"""What a plan is made from: medians of what was seen last, the same after a way through JSON."""

import json

import pytest

from moc.policy import Observed, Transfer
from moc.policy.interval import BLOCK, BLOCKS, WARM_UP
from moc.policy.measurements import UNDISTURBED_MTBF_S, Measurements
from tests.errors import raises


def measured(iterations, seen):
    found = Measurements()
    for _ in range(iterations):
        found.observe(seen)
    return found


def test_times_without_stalls_and_rates():
    seen = Observed(3.0, stall_s=1.0, forward_backward_s=1.5, copied=Transfer(80.0, 2.0), written=Transfer(80.0, 8.0))
    found = measured(WARM_UP + BLOCK, seen)
    assert found.figures == {"iteration_s": 2.0, "forward_backward_s": 1.5, "copy_rate": 40.0, "write_rate": 10.0}
    assert found.trained_s == 3.0 * (WARM_UP + BLOCK)
    for unknown in (Observed(2.0), Observed(2.0, copied=Transfer(80.0, 0.0), written=Transfer(0.0, 8.0))):
        for _ in range(BLOCK + 1):  # what took no time, or had no bytes, tells nothing
            found.observe(unknown)
    assert found.figures == {"iteration_s": 2.0, "forward_backward_s": 1.5, "copy_rate": 40.0, "write_rate": 10.0}


def test_the_first_iterations_do_not_count_and_one_hiccup_neither():
    found = measured(WARM_UP, Observed(100.0, forward_backward_s=90.0))
    assert not found.figures
    for _ in range(BLOCK - 1):
        found.observe(Observed(2.0, forward_backward_s=1.0))
    assert not found.figures  # not before there is a block of them
    found = measured(WARM_UP, Observed(100.0, forward_backward_s=90.0))
    for seconds in (*(2.0,) * BLOCK, 50.0):
        found.observe(Observed(seconds, forward_backward_s=0.5 * seconds))
    assert found.figures == {"iteration_s": 2.0, "forward_backward_s": 1.0}


def test_what_was_long_ago_is_forgotten():
    found = measured(WARM_UP + BLOCK, Observed(1.0, forward_backward_s=1.0, replicated=Transfer(1.0, 1.0)))
    for _ in range(BLOCK * BLOCKS):
        found.observe(Observed(4.0, forward_backward_s=3.0, replicated=Transfer(6.0, 1.0)))
    assert found.figures == {"iteration_s": 4.0, "forward_backward_s": 3.0, "replicate_rate": 6.0}


def test_bubbles_count_where_they_are_timed():
    found = measured(WARM_UP + BLOCK, Observed(4.0, forward_backward_s=3.0))
    assert "bubble_s" not in found.figures and "bubble_s" not in found.state_dict()
    for _ in range(BLOCK):
        found.observe(Observed(4.0, forward_backward_s=3.0, bubble_s=1.0))
    assert found.figures["bubble_s"] == 1.0
    again = Measurements.from_state(json.loads(json.dumps(found.state_dict())))
    assert again.figures == found.figures


def test_faults_shorten_what_is_expected_from_one_to_the_next():
    found = Measurements()
    assert found.mtbf_s == UNDISTURBED_MTBF_S
    found.trained_s, found.faults = 36_000.0, 9
    assert found.mtbf_s == (UNDISTURBED_MTBF_S + 36_000) / 10
    found.trained_s, found.faults = 1e9, 1000
    assert found.mtbf_s == pytest.approx(1e6, rel=0.01)


def test_it_goes_on_from_what_is_stored():
    found = measured(WARM_UP + BLOCK + 3, Observed(3.0, forward_backward_s=2.0, written=Transfer(5.0, 2.0)))
    found.faults = 2
    again = Measurements.from_state(json.loads(json.dumps(found.state_dict())))
    assert again.state_dict() == found.state_dict() and again.figures == found.figures
    for _ in range(WARM_UP):
        again.observe(Observed(99.0, forward_backward_s=98.0))
    assert again.figures == found.figures
    with raises("saved-state-invalid"):
        Measurements.from_state({"trained_s": 1.0})
