"""What an iteration and its snapshots took: told once each, as means over workers."""

import time

import pytest

from moc.policy import Transfer
from moc.session.saving.metrics import Meter

COPIED = dict(snapshot_bytes=400.0, snapshot_copy_s=2.0, snapshot_gradients_s=0.2)
WRITTEN = dict(snapshot_written_bytes=200.0, snapshot_write_s=8.0)


def totals_of(meters):
    """The sum of what all tell."""
    mine = [meter.contribution() for meter in meters]
    return {name: sum(one[name] for one in mine) for name in mine[0]}


def test_iteration_event_has_all_reports_since_last():
    meters = [Meter(2), Meter(2)]
    for meter in meters:
        assert meter.completed(time.perf_counter() - 1.0) is None
        meter.on_iteration_end(started=True, busy=True)
    with meters[0].stalling():
        time.sleep(0.02)
    totals = totals_of(meters)
    for meter in meters:
        stall_s = meter.receive(totals)
        meter.copied(COPIED)
        meter.replicated(300, 4.0, nodes=3)
        meter.written(WRITTEN)
        assert meter.receive(dict(totals, snapshot_stall_s=1.0)) == 0.5
        assert meter.trained(totals) == totals["snapshot_iteration_s"] / 2 > 1.0
        seen = meter.completed(time.perf_counter())
        assert seen.stall_s == pytest.approx(stall_s + 0.5) and stall_s >= 0.01
        assert (seen.copied, seen.written) == (Transfer(200.0, 1.0), Transfer(100.0, 4.0))
        assert seen.replicated == Transfer(100.0, 4.0)
        assert seen.snapshot_started and seen.snapshot_pending
        assert meter.completed(time.perf_counter()) is None  # once


def test_waits_are_reported_with_their_iteration():
    meter = Meter(2, iter([3.0, 4.0]).__next__)
    meter.completed(time.perf_counter())
    meter.on_iteration_end(started=False, busy=False)
    totals = {name: 2 * value for name, value in meter.contribution().items()} | {"snapshot_bubble_s": 3.0 + 5.0}
    assert meter.contribution()["snapshot_bubble_s"] == 3.0  # of extra all-reduces, too
    meter.trained(totals)
    assert meter.completed(time.perf_counter()).bubble_s == 4.0


def test_first_iteration_is_not_measured():
    meter = Meter(1)
    totals = totals_of([meter])
    meter.receive(totals)
    assert meter.trained(totals) is None and meter.completed(time.perf_counter()) is None


def test_stall_is_reported_once():
    meter = Meter(1)
    with meter.stalling():
        time.sleep(0.01)
    assert meter.contribution()["snapshot_stall_s"] >= 0.01
    assert meter.contribution()["snapshot_stall_s"] == 0.0
