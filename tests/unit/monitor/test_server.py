"""The monitor of a launcher: metrics, page and hook, by real requests."""

import http.client
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from html.parser import HTMLParser

import pytest

from moc.errors import codes_in
from moc.monitor import server
from moc.monitor.job_view import JobView
from moc.monitor.metrics import render_metrics
from moc.monitor.page import render_content
from moc.monitor.problems import find_problems
from moc.monitor.summary import summarize
from moc.report.run_state import RunFold, fold_events
from tests.unit.monitor.monitored import Monitored, agent_state, assert_metrics_equal_events, control, parse_metrics
from tests.unit.report.test_program import Story, saved
from tests.worlds import REPOSITORY

pytest.importorskip("aiohttp", reason="the package aiohttp is missing")
pytest.importorskip("prometheus_client", reason="the package prometheus_client is missing")


@pytest.fixture
def monitored(tmp_path):
    with Monitored(tmp_path) as started:
        yield started


def test_metrics_match_events_as_they_arrive(monitored):
    events = saved().tell("exit", 1.0, reason="done", code=0).events
    monitored.send(**agent_state())
    for begin, end in ((0, 10), (10, len(events))):
        monitored.write(events[begin:end])
        total = f'moc_events_total{{type="{events[end - 1]["type"]}"}}'
        count = sum(event["type"] == events[end - 1]["type"] for event in events[:end])
        monitored.until(lambda total=total, count=count: monitored.metrics().get(total) == count)
        assert_metrics_equal_events(monitored.metrics(), events[:end])
    metrics = monitored.metrics()
    assert metrics['moc_snapshot_iteration{tier="peers"}'] == 10 and metrics["moc_snapshot_replicas"] == 1
    assert metrics['moc_losses_total{cause="worker-lost"}'] == 1 and metrics["moc_tokens_lost_ratio"] == 0.25
    assert metrics['moc_node_workers{state="waiting"}'] == 1 and metrics["moc_lease_seconds"] == 12.5
    assert monitored.end() == 0


def test_torn_and_replaced_files_and_unknown_lines_are_read(monitored):
    story = Story().start().usual(4)
    whole = "".join(json.dumps(event) + "\n" for event in story.events)
    monitored.events.write_text(whole[: len(whole) // 2])
    monitored.until(lambda: monitored.metrics().get("moc_iteration"))
    with open(monitored.events, "a") as file:
        file.write(whole[len(whole) // 2 :] + '{"type": "iteration"}\nnot JSON\n[]\n')
        file.writelines(f'{{"type": "{kind}", "time": 1.0}}\n' for kind in ("memory", "rebalance", "persist"))
        file.write(f'{{"type": "unknown", "time": {story.now}, "number": 1{"0" * 400}, "other": NaN}}\n')
    monitored.until(lambda: monitored.metrics().get('moc_events_total{type="unknown"}'))
    assert monitored.metrics()["moc_iteration"] == 4 and monitored.get()[0] == 200
    monitored.events.unlink()
    monitored.write(Story().start().usual(2).events)
    monitored.until(lambda: monitored.metrics().get("moc_iteration") == 2)
    assert_metrics_equal_events(monitored.metrics(), Story().start().usual(2).events)


def test_open_page_receives_loss(monitored):
    monitored.write(Story().start().usual(4).events)
    connection = http.client.HTTPConnection("127.0.0.1", monitored.port("dashboard"), timeout=30)
    connection.request("GET", "/updates")
    stream = connection.getresponse()
    assert b"data: " in stream.readline()
    monitored.send(**agent_state(generation=1, workers=1, nodes=2, vacant=[1]))
    while b"Lost: node 1" not in (line := stream.readline()):
        assert line  # the stream goes on
    connection.close()
    assert "Of node 0, 1 worker is not running" in monitored.get()[1]


class Tags(HTMLParser):
    """Names of all elements, and their attributes."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.names = set(), set()
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.names.update(name for name, _ in attrs)


HOSTILE = "</title><script>alert(1)</script><img src=x onerror='alert(2)'>\x1b[2J\udcff"


def test_foreign_strings_are_escaped(monitored):
    story = Story().tell("choice", iteration=1, reason=HOSTILE, ckpt_policy=HOSTILE)
    story.tell("start", 1.0, iteration=0, run=HOSTILE, world_size=2, startup_s={})
    story.tell("generation", 1.0, reason=HOSTILE, cause=HOSTILE, noticed_s=0.1, met_s=0.1).usual(3)
    monitored.write(story.tell("abandoned", iteration=1, reason=HOSTILE).events)
    monitored.until(lambda: "Latest events" in monitored.get()[1])
    _, html, headers = monitored.get()
    found = Tags(html)
    assert found.tags.isdisjoint({"img", "iframe", "style"}) and not [n for n in found.names if n.startswith("on")]
    assert html.count("<script") == 1 and "script-src 'self'" in headers["Content-Security-Policy"]
    assert monitored.get("/metrics", "metrics")[0] == 200 and monitored.get("/state")[0] == 200 and "\x1b" not in html


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8265", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
    ],
)
def test_host_header_must_name_this_machine(monitored, host, status):
    assert monitored.get(Host=host)[0] == status


def test_slow_name_server_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr("socket.getfqdn", lambda: asked.append(1) or "node.example")
    server._names_of_machine.cache_clear()
    assert [server.is_known_host(host, "") for host in ("node.example:80", "evil.example", "x")] == [True, False, False]
    server._names_of_machine.cache_clear()
    assert len(asked) == 1


def test_monitor_is_read_only(monitored):
    for method in ("POST", "PUT", "DELETE"):
        assert monitored.get(method=method)[0] == 405
    assert monitored.get("/../../etc/passwd")[0] == 404


def test_token_is_required_beyond_loopback(tmp_path):
    with Monitored(tmp_path, token="a secret", address="0.0.0.0") as monitored:
        for path, name in (
            ("/", "dashboard"),
            ("/state", "dashboard"),
            ("/updates", "dashboard"),
            ("/metrics", "metrics"),
        ):
            assert monitored.get(path, name)[0] == 401
            assert monitored.get(path, name, Authorization="Bearer other")[0] == 401
        assert monitored.get("/metrics", "metrics", Authorization="Bearer a secret")[0] == 200
        status, _, headers = monitored.get("/?token=a%20secret")
        assert status == 200 and "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
        assert monitored.get("/state", Cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200
        assert monitored.get("/?token=a%20secret", Cookie="moc_token=earlier")[0] == 200  # of another job
        with socket.create_connection(("127.0.0.1", monitored.port("dashboard"))) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n")
            assert b" 401 " in client.recv(1000)
        assert "a secret" not in monitored.console and "Traceback" not in monitored.console


def test_used_port_is_reported_and_other_server_works(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with Monitored(tmp_path / "a", "--metrics-port", port, "--dashboard-port", "0") as monitored:
            assert monitored.get()[0] == 200
            assert monitored.console.count("[monitor-port-unusable]") == 1
        with Monitored(tmp_path / "b", "--metrics-port", port, "--dashboard-port", port) as monitored:
            assert monitored.process.wait(60) == 3 and monitored.console.count("\n") == 2


def test_hook_gets_each_event_once_and_its_failure_is_harmless(tmp_path):
    story = Story().start().usual(3).tell("no\0name").generation(1.0).resume(1.0)
    passed = tmp_path / "passed"
    with Monitored(tmp_path / "a", "--on-event", f'test "$MOC_EVENT" != resume && cat >> {passed}') as monitored:
        monitored.write(story.events)
        counted = 'moc_hook_commands_total{result="failed"}'
        monitored.until(lambda: monitored.metrics()[counted] == 2)
        assert monitored.metrics()['moc_hook_commands_total{result="done"}'] == 2
        monitored.until(lambda: codes_in(monitored.console) == ["hook-failed"] * 2)
    told = passed.read_text().replace("}{", "}\n{").splitlines()
    assert [json.loads(line)["type"] for line in told] == ["start", "generation"]


def test_update_is_small_with_ten_thousand_workers():
    story = Story().start()
    for _ in range(60):
        story.usual(2).generation(1.0).resume(1.0).start(1.0)
        story.tell("abandoned", reason="x" * 10_000, iteration=1)
    state = fold_events(story.usual(2000).events)
    for per_node in (1, 8):
        nodes = 10_000 // per_node
        message = agent_state(nodes=nodes, vacant=range(0, nodes, 7), workers=per_node)
        content = render_content(state, JobView().updated(message, 1.0), story.now)
        assert len(content.encode()) <= 200_000


def test_problems_are_found_and_healthy_run_has_none():
    healthy = Story().start().usual(20)
    job = JobView().updated(agent_state(), healthy.now)
    assert find_problems(fold_events(healthy.events), job, healthy.now) == ()

    def found(story, later=0.0, view=job):
        return [one.text for one in find_problems(fold_events(story.events), view, story.now + later)]

    ill = Story().start().usual(4).tell("persist", bytes=1, iteration=4, write_s=1.0, publish_s=1.0)
    for _ in range(3):
        ill.tell("stall", 0.25, seconds=0.25).train(1.25).generation(0.5).resume(0.5).start(0.5).usual(1)
    ill.tell("save_skipped", iteration=8)
    texts = "\n".join(found(ill, later=1900.0))
    for part in (
        "minutes old",
        "Worker 2 (node 1) was lost 3 times within an hour, the last time",
        "Storage is too slow",
        "% of the wall clock",
    ):
        assert part in texts
    view = job.updated(agent_state(generation=1), healthy.now + 1.0)
    assert found(healthy, view=view)[0].startswith("Training is interrupted")
    assert found(healthy.usual(2), view=view) == []  # a program need not write the event of a generation
    assert [summarize(fold_events(healthy.events), one, healthy.now).status for one in (job, view)] == ["training"] * 2
    silent = find_problems(fold_events(healthy.events), job, healthy.now + 61.0)
    assert "worker 0" in silent[0].text and "worker 1" not in silent[0].text  # the second worker waits for the first
    assert summarize(fold_events(healthy.events), job, healthy.now + 61.0).status == "silent"
    assert all(one.remedy for one in (*silent, *find_problems(fold_events(ill.events), job, ill.now + 1900.0)))
    ended = JobView().updated(agent_state() | {"control": control(end={"reason": "lost", "code": 137})}, 1.0)
    assert found(healthy, view=ended)[0].startswith("The job has ended with code 137")


def test_long_evaluation_is_silent_only_if_it_hangs():
    story = Story().start().usual(20)
    later, state = story.now + 61.0, agent_state()
    for seconds, is_silent in ((0.5, False), (40.0, True)):
        for worker in state["workers"]:
            worker |= {"section": "evaluation", "seconds": seconds}
        problems = find_problems(fold_events(story.events), JobView().updated(state, later), later)
        assert bool(problems) == is_silent
    problems = find_problems(fold_events(story.events), JobView().updated(agent_state(), story.now), later)
    assert problems  # no message of the launcher


@pytest.mark.parametrize(("tier", "place"), [("memory", "memory"), ("disk", "buffers")])
def test_buffers_of_disk_tier_are_not_called_memory(tier, place):
    story = Story().start().usual(4).tell("snapshot", iteration=4, tier=tier, bytes=1, copy_s=0.1, hash_s=0.1)
    state = fold_events(story.events)
    (table,) = (table for table in summarize(state, JobView(), story.now).tables if table.title == "Snapshots")
    assert [row[0] for row in table.rows] == [place]
    assert f'moc_snapshot_iteration{{tier="{place}"}} 4.0' in render_metrics(state, JobView(), story.now, {}).decode()


def test_end_and_earlier_launch_are_distinguished():
    lost = Story().tell("start", iteration=0, job="earlier", world_size=4).usual(20).generation(1.0)
    ended = Story().start().usual(20).generation(1.0).tell("end", 1.0, reason="worker 2 was killed", code=137)
    texts = [
        [problem.text for problem in find_problems(fold_events(story.events), JobView(), story.now)]
        for story in (lost, ended)
    ]
    assert "Training is interrupted" in texts[0][0] and "node 1" in texts[0][0]
    assert texts[1] == ["The job has ended with code 137: worker 2 was killed"]
    restarted = JobView().updated(agent_state(), lost.now)
    summary = summarize(fold_events(lost.events), restarted, lost.now + 7200.0)
    assert (summary.status, summary.problems) == ("starting", ())


def test_loss_is_named_before_its_event():
    healthy = Story().start().usual(20)
    message, loss = agent_state(generation=1), dict(generation=1, reason="worker 5 was killed by signal 9", node=3)
    message["control"]["membership"]["losses"] = ["", [loss]]
    view = JobView().updated(agent_state(), healthy.now).updated(message, healthy.now + 1.0)
    (problem,) = find_problems(fold_events(healthy.events), view, healthy.now + 1.0)
    assert "worker 5 was killed by signal 9, on node 3" in problem.text


class Unsearched(list):
    """A list that is not searched for each of its elements."""

    def __contains__(self, value):
        raise AssertionError(value)


def test_members_are_not_searched_for_each_node():
    message = agent_state(nodes=5, vacant=[4])
    message["control"]["membership"]["members"] = Unsearched([0, 1, 3])
    states = JobView().updated(message, 1.0).states
    assert [*states.values()] == ["training", "training", "not training", "training", "lost"]


def test_risks_of_a_running_job_are_problems():
    """Each is critical, and no other problem is shown."""
    counts = dict(least=1, fewer=4, experts=8, wanted=2)
    stalled = Story().start().usual(400)  # long ago, so that the share of the complete run is small
    for _ in range(4):
        stalled.tell("stall", 3.0, seconds=3.0).train(4.0)
    behind = Story().start().usual(4, storage_age=4.0, storage_overdue=6.0)
    waiting = Story().start().usual(4).tell("storage_silent", 5.0, where="/storage", waits=True)
    few = Story().start().tell("expert_replicas", iteration=0, **counts).usual(4)
    begins = (
        "Training waits for snapshots",
        "Storage is behind: no snapshot",
        "/storage does not answer",
        "4 of 8 experts",
    )
    for story, begin in zip((stalled, behind, waiting, few), begins, strict=True):
        (problem,) = find_problems(fold_events(story.events), JobView(), story.now)
        assert problem.text.startswith(begin) and problem.is_critical == (story is not stalled) and problem.remedy
    answered = waiting.tell("persist", bytes=1, iteration=4, write_s=1.0, publish_s=1.0)
    enough = few.tell("expert_replicas", iteration=4, **counts | dict(least=2, fewer=0))
    for story in (answered, enough, behind.usual(2, storage_overdue=0.0)):
        assert find_problems(fold_events(story.events), JobView(), story.now) == ()


def test_node_without_the_events_names_the_one_that_has_them():
    job = JobView().updated(agent_state(nodes=2) | {"node": 1}, 1.0)
    (problem,) = find_problems(fold_events([]), job, 2.0)
    assert "node 0" in problem.text and summarize(fold_events([]), job, 2.0).status == "iteration 9"


def test_counters_never_decrease():
    """The excess of a recovery's first iteration follows the median of all iterations, which changes."""

    story = Story().start().usual(20).generation(1.0).resume(1.0).start(1.0).train(3.0)
    scrapes = []
    for seconds, count in ((1.0, 10), (2.0, 100)):
        state = fold_events(story.train(*[seconds] * count).events)
        text = render_metrics(state, JobView(), story.now, {}).decode()
        counters = tuple(re.findall(r"# TYPE (\S+) counter", text))
        scrapes.append({name: value for name, value in parse_metrics(text).items() if name.startswith(counters)})
    first, second = scrapes
    assert first and all(second[name] >= value for name, value in first.items())


def test_mfu_is_shown_if_known():

    for fields, shown in (({}, None), ({"mfu": 0.412}, "41.2 %")):
        state = fold_events(Story().start().usual(2, **fields).events)
        assert summarize(state, JobView(), 0.0).figures.get("MFU") == shown
        assert parse_metrics(render_metrics(state, JobView(), 0.0, {}).decode()).get("moc_mfu_ratio") == fields.get(
            "mfu"
        )


def test_monitor_cost_is_bounded():
    assert len(json.dumps(agent_state(workers=8)["workers"])) <= 8 * 150  # bytes, once per second
    story = Story().start()
    for _ in range(200):
        story.usual(5).tell("snapshot", iteration=story.iteration, tier="memory", bytes=10, copy_s=0.1, hash_s=0.1)
    fold, begun = RunFold(keeps_events=False), time.process_time()
    for event in story.events:
        fold.add(event)
    per_event = (time.process_time() - begun) / len(story.events)
    assert per_event < 0.001  # seconds, in the monitor's process


def test_event_file_without_launcher_is_served(tmp_path):
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in saved().events))
    command = [sys.executable, str(REPOSITORY / "tools/monitor.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1 and codes_in(ended.stderr) == ["nothing-to-do"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = subprocess.run([*command, "--metrics-port", port], capture_output=True, text=True)
    assert ended.returncode == 3 and codes_in(ended.stderr) == ["monitor-port-unusable"]
    assert (
        "--monitor-address" not in ended.stderr and "mocrun" not in ended.stderr and "--address" in ended.stderr
    )  # of this program
    process = subprocess.Popen([*command, "--metrics-port", "0"], stderr=subprocess.PIPE, text=True)
    try:
        url = process.stderr.readline().split()[-1]
        while "moc_iteration 11.0" not in (text := urllib.request.urlopen(url).read().decode()):
            assert process.poll() is None
        assert "moc_node_workers" not in text
    finally:
        process.kill()
        process.communicate()


def test_killed_launcher_leaves_no_directory(tmp_path):
    directory = tmp_path / "moc-monitor-y"
    directory.mkdir()
    words = [sys.executable, "-m", "moc.monitor.server", "--directory", str(directory), "--metrics-port", "0"]
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.Popen({words}, stdin=subprocess.PIPE).wait()"],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "metrics: " in launcher.stderr.readline()
    launcher.kill()
    launcher.wait()
    launcher.stderr.read()  # to the end of the monitor
    assert not directory.exists()
    launcher.stderr.close()


def test_monitor_reports_file_it_waits_for(tmp_path):
    words = ["moc.monitor.server", str(tmp_path), "--metrics-port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", *words], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        lines = [process.stderr.readline() for _ in range(2)]
        assert any(str(tmp_path / "events.jsonl") in line for line in lines), lines
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
