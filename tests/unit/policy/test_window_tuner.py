"""What a sparse window is chosen by: medians of what was seen last, and a snapshot in every iteration after that."""

import json

from moc.policy import Observed, Transfer
from moc.policy.interval import BLOCK, SNAPSHOTS, WARM_UP
from moc.policy.window import WindowTuner
from tests.errors import raises


def seen(seconds, size=0.0, took=0.0):
    return Observed(seconds + 1.0, forward_backward_s=seconds, copied=Transfer(size, took))


def measured(tuner, *seconds):
    for one in seconds:
        tuner.observe(seen(one))
    return tuner


def test_the_first_iterations_are_passed_over_and_a_block_is_measured_without_a_snapshot():
    tuner = measured(WindowTuner(), *[90.0] * WARM_UP)
    assert tuner.seconds is None and not tuner.due(WARM_UP)
    measured(tuner, *[2.0] * (BLOCK - 1))
    assert not tuner.due(WARM_UP + BLOCK - 1) and tuner.seconds == 2.0
    measured(tuner, 2.0)
    assert not tuner.due(0) and all(tuner.due(iteration) for iteration in (1, WARM_UP + BLOCK, 1000))


def test_what_counts_is_the_median_of_the_newest():
    tuner = measured(WindowTuner(), *[9.0] * WARM_UP, *[5.0] * BLOCK, *[1.0] * (BLOCK // 2 + 1))
    assert tuner.seconds == 1.0
    measured(tuner, 0.0)  # nothing was measured
    assert tuner.seconds == 1.0 and tuner.due(1)


def test_bandwidths_are_known_from_the_first_copy_on():
    tuner = WindowTuner()
    assert tuner.bandwidth is None
    for size, took in ((80.0, 0.0), (0.0, 2.0), (80.0, 2.0), (60.0, 2.0), (30.0, 3.0)):
        tuner.observe(seen(1.0, size, took))  # what has no bytes or took no time tells nothing
    assert SNAPSHOTS == 3 and tuner.bandwidth == 30.0
    tuner.observe(seen(1.0, 5.0, 1.0))
    assert tuner.bandwidth == 10.0


def test_a_resumed_run_knows_what_was_measured_and_passes_over_its_first_iterations():
    tuner = measured(WindowTuner(), *[9.0] * WARM_UP, *[5.0] * BLOCK)
    tuner.observe(seen(5.0, 80.0, 2.0))
    state = json.loads(json.dumps(tuner.state_dict()))
    for resumed in (WindowTuner(), tuner):
        resumed.load_state_dict(state)
        assert (resumed.seconds, resumed.bandwidth, resumed.due(1)) == (5.0, 40.0, True)
        assert resumed.state_dict() == state
        measured(resumed, *[90.0] * WARM_UP)
        assert resumed.state_dict() == state
        measured(resumed, *[90.0] * (BLOCK // 2 + 1))
        assert resumed.seconds == 90.0
    empty = WindowTuner()
    empty.load_state_dict({})  # of another tuner
    assert empty.seconds is None and empty.bandwidth is None and not empty.due(1)
    for wrong in ({"bandwidths": ["x"]}, {"forward_backward_s": 3}, []):
        with raises("saved-state-invalid"):
            empty.load_state_dict(wrong)


def test_a_limit_shortens_longer_windows_alone():
    tuner = WindowTuner()
    assert tuner.limited(9) == 9
    tuner.limit_windows(4)
    assert [tuner.limited(length) for length in (3, 4, 9)] == [3, 4, 4]
