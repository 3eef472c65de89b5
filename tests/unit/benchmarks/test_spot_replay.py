"""Traces are scaled to few nodes and to other seconds, for jobs and for the simulator alike."""

from pathlib import Path

import pytest

from benchmarks.ettr.changes import Pauses, pauses
from benchmarks.spot_replay import BATCH, Change, Told, as_trace, by_most, changes, claims, ettr, forecast, parse
from moc.simulate.failures import ClusterEvent, Trace, read_trace
from tests.cases import each_row

TRACE = Trace(
    30,
    (
        ClusterEvent(100.0, gained=30),
        ClusterEvent(200.0, lost=2),
        ClusterEvent(300.0, lost=18),
        ClusterEvent(900.0, lost=40),
    ),
)
OF = (Change(0.0, 3), Change(10.0, 6), Change(30.0, 4))
OWN = parse(["--directory", str(Path("."))])


def test_a_trace_is_scaled():
    assert changes(TRACE, 600.0, 10.0) == OF  # of 60 nodes at most, two are too few to matter
    assert changes(TRACE, 200.0, 10.0, begin_s=150.0) == (Change(0.0, 6), Change(15.0, 4))


def read_back(of, building_s, path):
    path.write_text("\n".join(as_trace(of, building_s)))
    return read_trace(path)


def test_the_simulator_reads_the_same(tmp_path):
    assert read_back(OF, 0.0, tmp_path / "trace.csv") == Trace(
        3, (ClusterEvent(10.0, gained=3), ClusterEvent(30.0, lost=2))
    )


def test_nodes_that_build_are_there_later_or_never(tmp_path):
    assert read_back(OF, 5.0, tmp_path / "trace.csv") == Trace(
        3, (ClusterEvent(15.0, gained=3), ClusterEvent(30.0, lost=2))
    )
    assert read_back(OF, 25.0, tmp_path / "trace.csv") == Trace(3, (ClusterEvent(35.0, gained=1),))


def test_iterations_are_those_of_the_workers_with_which_most_were_trained():
    """A few of more workers say little: they are those in which others have just come."""
    events = []
    for workers, seconds in ((3, (0.4,)), (6, (0.2, 0.9)), (4, (0.3, 0.3)), (3, (0.5,))):
        events += [{"type": "start", "world_size": workers}]
        events += [{"type": "iteration", "elapsed_s": one} for one in seconds]
    assert by_most(events) == (6, 0.55)
    assert by_most([*events, {"type": "iteration", "elapsed_s": 0.5}]) == (3, 0.5)


@each_row(("way", "seldom"), [("in process", {3, 4, 6}), ("fixed size", {4}), ("multiples", {2, 4, 6})])
def test_a_forecast(way, seldom, tmp_path):
    told = Told(seconds=60.0, iteration_s=0.25, most=4 if way == "fixed size" else 6)
    found = forecast(OWN, OF, way, told, Pauses(1.0, 2.0), tmp_path)
    assert 0 < found["samples"] < 60 / 0.25 * BATCH
    assert {int(nodes) for nodes in found["nodes_s"]} - {0} <= seldom
    assert found["ettr"] == pytest.approx(found["samples"] / BATCH * 0.25 / 60, rel=0.01)


def test_ettr_is_of_all_nodes_of_the_job():
    told = Told(samples=100 * BATCH, seconds=100.0, iteration_s=0.6, most=4)
    assert ettr(OWN, "fixed size", told) == pytest.approx(0.6)
    assert ettr(OWN, "in process", told) == pytest.approx(0.4)  # six nodes take four rounds, not six


def told(*what):
    """A start, by a number of workers; an iteration, by its end and how long it took."""
    return [
        {"type": "start", "world_size": one}
        if isinstance(one, int)
        else dict(zip(("time", "elapsed_s"), one, strict=True)) | {"type": "iteration"}
        for one in what
    ]


def test_pauses_are_told_from_events():
    events = told(3, (10.0, 2.0), (12.0, 2.0), 2, (17.0, 2.0), (19.0, 2.0), 4, (23.0, 2.0), 4)
    found = pauses(events, [14.5], 1.0, most=4)
    assert found.still_s == pytest.approx((2.0 + 1.0) / 2)  # from 12 to 15, and from 19 to 21, less half an iteration
    assert found.building_s == 0.0  # it was started before the change that it was not part of
    assert pauses(events, [15.5], 1.0, most=4).building_s == pytest.approx(3.5)
    assert pauses(events, [15.5], 1.0, most=6).building_s == pytest.approx(2.5)
    assert pauses(events[:3], [], 1.0, most=4) == Pauses()


def test_what_does_not_hold_is_said():
    ours = {"samples": 100, "losses": 2, "survived": 1, "fallbacks": [], "ettr": 0.9, "forecast": {"ettr": 0.86}}
    other = {"samples": 120, "ettr": 0.9}
    assert list(claims("a", {"in process": ours, "fixed size": other}).values()) == [False, False, False]
    ours |= {"samples": 121, "fallbacks": ["no holder"], "forecast": {"ettr": 0.88}}
    assert all(claims("a", {"in process": ours, "fixed size": other}).values())
