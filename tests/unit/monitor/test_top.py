"""The terminal view, from a page and from an event file."""

import json

import pytest

from moc.errors import codes_in
from moc.monitor import top
from tests.unit.monitor.monitored import Monitored, agent_state
from tests.unit.report.test_program import Story


def story():
    return Story().tell("choice", iteration=1, reason="\x1b[2Jhidden").start().usual(4).generation(1.0)


def shown(capsys, *arguments):
    """Runs the program; returns its output and the codes of its errors."""
    ended = top.main(list(arguments))
    output = capsys.readouterr()
    codes = codes_in(output.err)
    assert ended == bool(codes)
    return output.out, codes


def test_event_file_is_shown_with_escaped_text(tmp_path, capsys):
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in story().events))
    output, codes = shown(capsys, str(tmp_path), "--once")
    assert not codes and "worker 2 was killed by signal 9" in output and "\x1b" not in output and "hidden" in output
    assert shown(capsys, str(tmp_path / "missing"))[1] == ["file-missing"]


def test_page_is_shown_and_another_job_refused(tmp_path, capsys, monkeypatch):
    pytest.importorskip("aiohttp", reason="the package aiohttp is missing")
    pytest.importorskip("prometheus_client", reason="the package prometheus_client is missing")
    with Monitored(tmp_path, token="a secret", address="0.0.0.0") as monitored:
        url = f"http://127.0.0.1:{monitored.port('dashboard')}"
        assert shown(capsys, url)[1] == ["monitor-unreachable"]
        monkeypatch.setenv("MOC_MONITOR_TOKEN", "a secret")
        monitored.send(**agent_state(nodes=2, vacant=[1]))
        monitored.write(story().events)
        monitored.until(lambda: "Lost: node 1" in shown(capsys, url, "--job", "4ab2")[0])
        assert shown(capsys, url, "--job", "other")[1] == ["job-differs"]
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert "Lost: node 1" in shown(capsys)[0] and "Lost: node 1" in shown(capsys, "--job", "4ab2")[0]
        assert shown(capsys, "--job", "other")[1] == ["job-not-found"]
