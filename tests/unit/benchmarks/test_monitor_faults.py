"""The campaign of kills under a monitor: metrics are compared with sums over the lines of the file."""

from benchmarks import monitor_faults
from moc.monitor.job_view import JobView
from moc.monitor.metrics import render_metrics
from moc.report.run_state import fold_events
from tests.unit.report.test_program import saved


def test_metrics_equal_sums_of_event_lines():
    events = saved().generation(1.0).start(1.0).usual(2).events
    found = monitor_faults.parse(render_metrics(fold_events(events), JobView(), 0.0, {}).decode())
    values = monitor_faults.expected(events)
    assert values.items() <= found.items() and 'moc_losses_total{cause="worker-lost"}' in values
    assert not monitor_faults.expected(events[:-1]).items() <= found.items()
