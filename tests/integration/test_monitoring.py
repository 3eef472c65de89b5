"""A job with its monitor: workers, controller and monitor are killed, and all views show what the events say."""

import json
import os
import re
import shutil
import subprocess
import threading
import time
import urllib.request
from contextlib import contextmanager

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moc.errors import codes_in
from moc.files.event_log import losses_of
from tests.integration.launched import PATIENCE_S, Launched
from tests.integration.snapshot_files import node_memory
from tests.integration.tiny import SHALLOW
from tests.unit.monitor.monitored import assert_metrics_equal_events, parse_metrics

pytest.importorskip("aiohttp", reason="the package aiohttp is missing")
pytest.importorskip("prometheus_client", reason="the package prometheus_client is missing")
pytestmark = pytest.mark.recovery

KILLS = 100 if os.environ.get("MOC_TESTS_ALL") else 4
BETWEEN = 4  # iterations from one kill to the next
MERGED = 2  # the kill during whose recovery the other worker is killed


@pytest.fixture
def job(data, tmp_path):
    """Two workers with snapshots in memory, and a monitor."""
    with node_memory() as memory:
        flags = data | SHALLOW | dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_memory_dir=memory)
        flags |= dict(ckpt_policy="full", ckpt_tier="memory", snapshot_interval=1)
        flags |= dict(train_iters=(KILLS + 2) * BETWEEN)
        flags |= dict(tensorboard_dir=str(tmp_path / "board"))
        ports = "--metrics-port", "0", "--dashboard-port", "0", "--on-event", f"cat >> {tmp_path / 'passed'}"
        with Launched("DP2", flags, tmp_path / "job", *ports) as started:
            yield started


def url(job, name):
    """Waits until the newest monitor serves something; returns its address."""
    job.tells(f"mocrun: {name}: http")
    return re.findall(rf"{name}: (http\S+)", job.console)[-1]


def get(address):
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        return answer.read().decode()


def until(job, condition):
    """Waits until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, job.console[-4000:]
        time.sleep(0.05)


@contextmanager
def watching(job):
    """Scrapes metrics and reads the page's updates all the time; yields what was read."""
    read, ended = {"scrapes": 0, "updates": 0}, threading.Event()

    def scrape():
        while not ended.is_set():
            with urllib.request.urlopen(url(job, "metrics"), timeout=PATIENCE_S) as answer:
                read["scrapes"] += bool(parse_metrics(answer.read().decode()))
            ended.wait(0.1)

    def follow():
        with urllib.request.urlopen(url(job, "dashboard") + "updates", timeout=PATIENCE_S) as answer:
            while not ended.is_set():
                read["updates"] += answer.readline().startswith(b"data: ")

    threads = [threading.Thread(target=target, daemon=True) for target in (scrape, follow)]
    for thread in threads:
        thread.start()
    yield read
    ended.set()
    for thread in threads:
        thread.join(PATIENCE_S)


def test_metrics_equal_events_after_kills(job, tmp_path):
    job.reach(BETWEEN - 2)
    with watching(job) as read:
        for kill in range(KILLS):
            before, rank = job.pids, kill % 2
            job.kill(rank)
            job.replaces(before, rank)
            if kill == MERGED:  # before the replacement has connected
                job.kill(1 - rank)
            # a loss before the end of a recovery starts another generation, with one event for both
            until(job, lambda kill=kill: len(job.events("generation")) > kill)
            if kill == 1:
                os.kill(job.children("moc.runtime.controller")[0], 9)
            job.reach((kill + 2) * BETWEEN - 2)
        job.reach((KILLS + 2) * BETWEEN - 2)  # where it waits
    assert read["scrapes"] > KILLS and read["updates"] > KILLS
    lines = [json.loads(line) for line in (job.log / "events.jsonl").read_text().splitlines()]
    count = f'moc_events_total{{type="iteration"}} {sum(event["type"] == "iteration" for event in lines):.1f}'
    until(job, lambda: count in get(url(job, "metrics")))
    metrics = parse_metrics(get(url(job, "metrics")))
    assert_metrics_equal_events(metrics, lines)
    assert metrics["moc_restarts"] == metrics['moc_losses_total{cause="worker-lost"}'] == KILLS + 1
    assert metrics["moc_controller_epoch"] > 0 and metrics['moc_node_workers{state="lost"}'] == 0
    killed = [*range(MERGED + 1), MERGED + 1, *range(MERGED + 1, KILLS)]
    losses = [loss for event in lines for loss in losses_of(event)]
    assert [(loss.rank, loss.node, loss.signal) for loss in losses] == [(kill % 2, 0, 9) for kill in killed]
    assert sum(metrics[f'moc_recent_losses{{rank="{rank}"}}'] for rank in range(2)) == KILLS + 1
    assert sum(event["type"] == "generation" for event in lines) == KILLS
    passed = tmp_path / "passed"  # what the hook has received; a killed monitor drops the events that wait for the hook
    until(job, lambda: passed.read_text().count('"type": "generation"') == KILLS)
    monitor = job.children("moc.monitor.server")
    os.kill(monitor[0], 9)  # training and the end of the job do not need it
    until(job, lambda: job.children("moc.monitor.server") not in ([], monitor))
    assert "monitor-lost" in codes_in(job.console)
    assert job.wait() == 0, job.console[-4000:]
    assert job.left() == []
    board = EventAccumulator(str(tmp_path / "board")).Reload()
    for tag in ("moc/snapshot/copy_s", "moc/snapshot/bytes", "moc/generation/met_s", "moc/resume/seconds"):
        assert board.Scalars(tag), tag
    assert len(board.Tensors("moc/recovery/text_summary")) == KILLS
    assert '"type": "iteration"' not in passed.read_text()


@contextmanager
def browser():
    """A headless Chromium; yields a function that calls its WebDriver."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in driver.stdout if "started successfully on port" in line)
        address = f"http://127.0.0.1:{int(re.findall(r'port (\d+)', line)[0])}/session"

        def call(path, **what):
            request = urllib.request.Request(address + path, json.dumps(what).encode())
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return json.load(answer)["value"]

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options = {"alwaysMatch": {"goog:chromeOptions": {"args": flags}}}
        session = call("", capabilities=options)["sessionId"]
        try:
            yield lambda path, **what: call(f"/{session}{path}", **what)
        finally:
            urllib.request.urlopen(urllib.request.Request(f"{address}/{session}", method="DELETE"))
    finally:
        driver.kill()
        driver.wait()


@pytest.mark.skipif(
    shutil.which("chromedriver") is None, reason="the Debian packages chromium, chromium-driver are missing"
)
def test_browser_shows_lost_worker_without_reload(job):
    job.reach(BETWEEN - 2)
    with browser() as call:
        call("/url", url=url(job, "dashboard"))
        text = "return document.getElementById('content').innerText"
        until(job, lambda: "Where the time went" in call("/execute/sync", script=text, args=[]))
        job.kill(1)
        until(job, lambda: "worker 1 was killed by signal 9" in call("/execute/sync", script=text, args=[]))
        assert call("/execute/sync", script="return performance.getEntriesByType('navigation').length", args=[]) == 1
        broken = "return performance.getEntriesByType('resource').filter(one => !one.name.startsWith(location.origin))"
        assert call("/execute/sync", script=broken, args=[]) == []
    assert job.wait() == 0, job.console[-4000:]
