"""What is reported of snapshots."""

import json
from types import SimpleNamespace

from moc.events import EventLog
from moc.session.report import SnapshotReport


def test_too_many_tokens_at_risk_are_warned_of_once(tmp_path):
    lines = []
    report = SnapshotReport(SimpleNamespace(message=lines.append, events=EventLog(tmp_path)), "memory")
    said = lambda plt, train_iters: ("too many", {"plt": plt}) if plt * train_iters > 1 else None  # noqa: E731
    policy = SimpleNamespace(at_risk=said)
    for iteration, plt in enumerate((0.1, 0.2, 0.3)):
        report.at_risk(iteration, policy, SimpleNamespace(plt_of_training=plt), 10)
    assert lines == ["WARNING: too many"]
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["type"], event["iteration"], event["plt"]) == ("at_risk", 1, 0.2)
