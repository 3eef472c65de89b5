"""What is reported of snapshots."""

import json
from types import SimpleNamespace

from moc.events import EventLog, problems
from moc.session.saving.metrics import SnapshotReport


def test_too_many_tokens_at_risk_are_reported_once(tmp_path):
    lines = []
    report = SnapshotReport(SimpleNamespace(message=lines.append, events=EventLog(tmp_path)), "memory")
    said = lambda plt, train_iters: ("too-many", {"plt": plt}) if plt * train_iters > 1 else None  # noqa: E731
    policy = SimpleNamespace(report=SimpleNamespace(at_risk=said))
    for iteration, plt in enumerate((0.1, 0.2, 0.3)):
        report.at_risk(iteration, policy, SimpleNamespace(plt_of_training=plt), 10)
    assert lines == ["WARNING: too-many"]
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["type"], event["iteration"], event["plt"]) == ("at_risk", 1, 0.2)


def test_failing_report_does_not_end_training(tmp_path):
    lines = []
    report = SnapshotReport(SimpleNamespace(message=lines.append, events=EventLog(tmp_path)), "memory")
    for _ in range(3):
        failing = SimpleNamespace(reason=lambda: "why", chosen=lambda: None.nothing)
        report.chosen(1, SimpleNamespace(report=failing))
        report.snapshot(1, {}, 2)
    (line,) = lines
    assert line.startswith("WARNING") and "AttributeError" in line


def test_unsent_bytes_and_differing_replicas_are_reported(tmp_path):
    lines = []
    report = SnapshotReport(SimpleNamespace(message=lines.append, events=EventLog(tmp_path)), "peers")
    report.replicated(3, 10, 90, 0.5)
    report.replicated(4, 100, 0, 0.5)
    for iteration in (3, 4):
        report.replicas_differ(iteration, ["a differs", "b differs"])
    events = list(map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines()))
    assert not [wrong for event in events for wrong in problems(event)]
    assert [(event["bytes"], event.get("not_sent_bytes")) for event in events[:2]] == [(10, 90), (100, None)]
    assert [(e["type"], e["iteration"], e["reason"][0]) for e in events[2:]] == [
        ("not_alike", iteration, name) for iteration in (3, 4) for name in "ab"
    ]
    assert lines == ["WARNING: a differs", "WARNING: b differs"]  # once
