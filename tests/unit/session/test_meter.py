"""What an iteration and its snapshots took: told once each, as means over workers."""

import time

import pytest

from moc.policy import Transfer
from moc.session.meter import Meter

COPIED = dict(snapshot_bytes=400.0, snapshot_copy_s=2.0)
WRITTEN = dict(snapshot_written_bytes=200.0, snapshot_write_s=8.0)


def vote(meters):
    """The sum of what all tell."""
    ballots = [meter.ballot() for meter in meters]
    return {name: sum(ballot[name] for ballot in ballots) for name in ballots[0]}


def test_an_iteration_is_told_with_all_that_was_heard_since_the_one_before():
    meters = [Meter(2), Meter(2)]
    for meter in meters:
        assert meter.completed(time.perf_counter() - 1.0) is None
        meter.ended(started=True, busy=True)
    with meters[0].stalling():
        time.sleep(0.02)
    tally = vote(meters)
    for meter in meters:
        stall_s = meter.hear(tally)
        meter.copied(COPIED)
        meter.replicated(300, 4.0, nodes=3)
        meter.written(WRITTEN)
        assert meter.hear(dict(tally, snapshot_stall_s=1.0)) == 0.5
        assert meter.trained(tally) == tally["snapshot_iteration_s"] / 2 > 1.0
        seen = meter.completed(time.perf_counter())
        assert seen.stall_s == pytest.approx(stall_s + 0.5) and stall_s >= 0.01
        assert (seen.copied, seen.written) == (Transfer(200.0, 1.0), Transfer(100.0, 4.0))
        assert seen.replicated == Transfer(100.0, 4.0)
        assert seen.snapshot_started and seen.snapshot_pending
        assert meter.completed(time.perf_counter()) is None  # once


def test_waits_of_an_iteration_are_told_with_it():
    meter = Meter(2, iter([3.0, 4.0]).__next__)
    meter.completed(time.perf_counter())
    meter.ended(started=False, busy=False)
    tally = {name: 2 * value for name, value in meter.ballot().items()} | {"snapshot_bubble_s": 3.0 + 5.0}
    assert meter.ballot()["snapshot_bubble_s"] == 3.0  # of extra votes, too
    meter.trained(tally)
    assert meter.completed(time.perf_counter()).bubble_s == 4.0


def test_the_first_iteration_is_not_one_to_learn_from():
    meter = Meter(1)
    tally = vote([meter])
    meter.hear(tally)
    assert meter.trained(tally) is None and meter.completed(time.perf_counter()) is None


def test_a_stall_is_told_once():
    meter = Meter(1)
    with meter.stalling():
        time.sleep(0.01)
    assert meter.ballot()["snapshot_stall_s"] >= 0.01
    assert meter.ballot()["snapshot_stall_s"] == 0.0
