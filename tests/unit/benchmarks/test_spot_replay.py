"""Traces are scaled to few nodes and to other seconds, for jobs and for the simulator alike."""

from pathlib import Path

import pytest

from benchmarks.spot_replay import Change, Told, as_trace, changes, forecast, on_most, parse
from moc.simulate.failures import Event, Trace, read_trace

TRACE = Trace(30, (Event(100.0, gained=30), Event(200.0, lost=2), Event(300.0, lost=18), Event(900.0, lost=40)))
OF = (Change(0.0, 3), Change(10.0, 6), Change(30.0, 4))


def test_a_trace_is_scaled():
    assert changes(TRACE, 600.0, 10.0) == OF  # of 60 nodes at most, two are too few to matter


def test_the_simulator_reads_the_same(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(as_trace(OF)))
    assert read_trace(path) == Trace(3, (Event(10.0, gained=3), Event(30.0, lost=2)))


def test_iterations_are_those_of_most_workers():
    events = []
    for workers, seconds in ((3, 0.4), (6, 0.2), (4, 0.3)):
        events += [{"type": "start", "world_size": workers}, {"type": "iteration", "elapsed_s": seconds}]
    assert on_most(events) == (6, 0.2)


@pytest.mark.parametrize(("way", "seldom"), [("in process", {3, 4, 6}), ("fixed size", {4}), ("multiples", {3, 4, 6})])
def test_a_forecast(way, seldom, tmp_path):
    own = parse(["--directory", str(Path("."))])
    found = forecast(own, OF, way, Told(seconds=60.0, iteration_s=0.25, most=4 if way == "fixed size" else 6), tmp_path)
    assert 0 < found["samples"] < 60 / 0.25 * 12
    assert {int(nodes) for nodes in found["nodes_s"]} - {0} <= seldom
