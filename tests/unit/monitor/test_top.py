"""The terminal view, from a page and from an event file."""

import contextlib
import dataclasses
import io
import json
import re
import socket
import threading

import pytest
from rich.console import Console

from moc.cli_output import ToolError
from moc.errors import codes_in
from moc.monitor import top
from moc.monitor.job_view import JobView
from moc.monitor.problems import Problem
from moc.monitor.summary import JobSummary, Table, summarize
from moc.report.run_state import fold_events
from moc.runtime.monitor_process import PAGE_FILE
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


def test_token_of_page_is_found_and_pasted(tmp_path, capsys, monkeypatch):
    pytest.importorskip("aiohttp", reason="the package aiohttp is missing")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which must not receive the token
    with Monitored(tmp_path, address="0.0.0.0") as monitored:  # it draws a token
        monitored.send(**agent_state())
        monitored.port("dashboard")
        url = (monitored.directory / PAGE_FILE).read_text()
        assert "token=" in url
        for arguments in ([], [url]):
            monitored.until(lambda arguments=arguments: "job 4ab2" in shown(capsys, *arguments)[0])
        assert shown(capsys, url.partition("?")[0])[1] == ["monitor-unreachable"]
        assert "?token=" in re.findall(r"dashboard: (\S+)", monitored.console)[0]


@pytest.fixture
def answers():
    """Starts a server that sends the same bytes to each client; returns its port."""
    with contextlib.ExitStack() as opened:

        def serve(answer):
            listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run():
                with contextlib.suppress(OSError):
                    while True:
                        with listener.accept()[0] as client:
                            client.recv(10_000)
                            client.sendall(answer)

            threading.Thread(target=run, daemon=True).start()
            opened.callback(lambda: listener.shutdown(socket.SHUT_RDWR))
            return listener.getsockname()[1]

        yield serve


def test_other_servers_and_wrong_addresses_are_one_sentence(answers, tmp_path, capsys):
    port = answers(b"SSH-2.0-OpenSSH_9.6\r\n")
    for source in (f"http://127.0.0.1:{port}", f"127.0.0.1:{port}", "http://127.0.0.1:x", "http://[", "http://a b"):
        assert shown(capsys, source)[1] == ["monitor-unreachable"], source
    (tmp_path / "events.jsonl").write_bytes(b"\x7fELF\n\n\0\n")
    assert shown(capsys, str(tmp_path))[1] == ["events-invalid"]
    for flag, value in (("--interval", "inf"), ("--interval", "0"), ("--rows", "-1")):
        with pytest.raises(SystemExit):
            top.main([str(tmp_path), flag, value])


def test_text_of_foreign_page_is_escaped(answers, capsys):
    hostile = "\x1b]0;title\x07\x1b[2J"
    problem = Problem(True, hostile, hostile)
    table = Table(hostile, (hostile,), ((hostile,),), 0)
    summary = JobSummary(hostile, hostile, hostile, (problem,), {hostile: hostile}, (table,))
    port = answers(b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(dataclasses.asdict(summary)).encode())
    output, codes = shown(capsys, f"http://127.0.0.1:{port}")
    assert not codes and "To do" in output and not {"\x1b", "\x07"} & {*output}


def test_last_state_stays_when_the_job_ends_or_its_page_is_lost(monkeypatch):
    monkeypatch.setattr(top, "_PATIENCE_S", 0.0)
    running = JobSummary("r", "j", "training", (), {"iteration": "41"}, ())
    ended = dataclasses.replace(running, status="ended", figures={"iteration": "42"})

    def lost():
        raise ToolError("no answer", code="monitor-unreachable")

    for last, iteration in ((lambda: ended, "42"), (lost, "41")):
        reads = iter([lambda: running, last])
        screen = Console(file=io.StringIO(), force_terminal=True, width=80, height=24)
        with contextlib.nullcontext() if last is not lost else pytest.raises(ToolError):
            top._show(lambda reads=reads: next(reads)(), screen, 10, 0.0)
        after = screen.file.getvalue().rpartition("\x1b[?1049l")[2]  # the alternate screen is left
        assert iteration in after


def test_narrow_terminal_names_node_and_cause_of_losses():
    summary = summarize(fold_events(story().usual(1).resume(1.0).start(1.0).usual(3).events), JobView(), 0.0)
    for width, shows_phases in ((80, False), (160, True)):
        screen = Console(file=io.StringIO(), width=width)
        screen.print(top.render(summary, 10, width))
        text = screen.file.getvalue()
        assert "worker-lost" in text and "signal 9" in text and ("detection" in text) == shows_phases, text


def test_dumb_terminal_shows_the_state_once(tmp_path, monkeypatch):
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in story().events))
    monkeypatch.setenv("TERM", "dumb")
    screen = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr(top, "console", lambda width: screen)
    assert top.main([str(tmp_path)]) == 0 and "worker 2 was killed" in screen.file.getvalue()
