"""A real Prometheus server scrapes a monitor: alerts of the docs fire, and queries of the dashboard have data."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request

import pytest
import yaml

from benchmarks.live.job import free_ports
from tests.unit.monitor.monitored import PATIENCE_S, Monitored, agent_state
from tests.unit.report.test_program import Story
from tests.worlds import REPOSITORY

DOCS = REPOSITORY / "docs/how-to/monitoring"
pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="the Debian package prometheus is missing")
pytest.importorskip("aiohttp", reason="the package aiohttp is missing")
pytest.importorskip("prometheus_client", reason="the package prometheus_client is missing")


@pytest.fixture
def monitored(tmp_path):
    with Monitored(tmp_path) as started:
        yield started


@pytest.fixture
def ask(monitored, tmp_path):
    """Starts Prometheus with the rules of the docs, without their waits; returns how to ask it."""
    (port,) = free_ports(1)
    rules = yaml.safe_load((DOCS / "alerts.yml").read_text())
    for rule in rules["groups"][0]["rules"]:
        rule.pop("for", None)
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
    target = {"job_name": "moc", "static_configs": [{"targets": [f"127.0.0.1:{monitored.port('metrics')}"]}]}
    every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = {"global": every, "rule_files": ["alerts.yml"], "scrape_configs": [target]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    flags = ["--config.file", tmp_path / "prometheus.yml", "--storage.tsdb.path", tmp_path / "data"]
    with open(tmp_path / "prometheus.log", "w") as log:
        process = subprocess.Popen(
            ["prometheus", *map(str, flags), "--web.listen-address", f"127.0.0.1:{port}"], stdout=log, stderr=log
        )

    def ask(path, **query):
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return json.load(answer)["data"]

    def is_up():
        try:
            return ask("query", query="moc_iteration")["result"]
        except OSError:
            return False

    try:
        ask.is_up = is_up
        yield ask
    finally:
        process.kill()
        process.wait()


def in_trouble():
    """A run with each problem that has an alert; its newest event is 15 minutes old."""
    story = Story()
    story.now = time.time() - 3200
    story.tell("placement", replicas=1, survival={"1": 1.0}).start().usual(10)
    story.tell("expert_replicas", iteration=0, least=1, fewer=4, experts=8, wanted=2)
    story.tell("snapshot", iteration=10, tier="memory", bytes=1000, copy_s=0.5, hash_s=0.5)
    story.tell("persist", iteration=10, bytes=1000, write_s=0.5, publish_s=0.5)
    for _ in range(3):
        story.tell("stall", 40.0, seconds=40.0).train(41.0).generation(1.0).resume(1.0).start(1.0).usual(
            2, storage_overdue=4.0
        )
    story.tell("evaluation", 2000.0, split="valid", loss=1.0)
    return story.generation(1.0)


@pytest.mark.slow
def test_alerts_fire_and_queries_have_data(monitored, ask):
    story = in_trouble()
    monitored.write(story.events)
    monitored.send(**agent_state(generation=4, nodes=3, vacant=[2]))
    monitored.until(ask.is_up)
    late = [
        {"type": "save_skipped", "time": story.now, "iteration": 16},
        {"type": "copy_missing", "time": story.now, "iteration": 16, "reason": "no memory"},
    ]
    monitored.write(late)
    rules = [rule["alert"] for rule in yaml.safe_load((DOCS / "alerts.yml").read_text())["groups"][0]["rules"]]

    def firing():
        return {alert["labels"]["alertname"] for alert in ask("alerts")["alerts"] if alert["state"] == "firing"}

    monitored.until(lambda: firing() >= set(rules) or time.sleep(0.5))
    for panel in json.loads((DOCS / "grafana.json").read_text())["panels"]:
        for target in panel["targets"]:
            assert ask("query", query=target["expr"])["result"], target["expr"]


def test_healthy_run_fires_no_alert(monitored, ask):
    story = Story()
    story.now = time.time() - 20
    monitored.write(story.start().usual(15).tell("persist", iteration=15, bytes=1, write_s=0.5, publish_s=0.5).events)
    monitored.send(**agent_state())
    monitored.until(ask.is_up)
    evaluations = "count_over_time(moc_iteration[1m]) > 3"
    monitored.until(lambda: ask("query", query=evaluations)["result"] or time.sleep(0.5))
    assert ask("alerts")["alerts"] == []
