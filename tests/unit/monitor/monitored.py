"""A monitor as a launcher starts it, without a launcher: events and states of the job come from the test."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import time

from moc.report.run_state import fold_events
from moc.runtime.environment import EVENTS_LINK
from tests.worlds import REPOSITORY

PATIENCE_S = 60.0


def control(generation=0, nodes=1, vacant=(), end=None):
    """State of a controller, as agents have it."""
    membership = {
        "generation": generation,
        "restarts": generation,
        "places": [[node, node] for node in range(nodes)],
        "vacant": list(vacant),
        "members": list(range(nodes)),
        "helpers": [],
        "losses": ["", []],
        "end": end,
    }
    return {"epoch": 1, "version": generation, "job": "4ab2", "membership": membership, "doors": {}}


def agent_state(generation=0, workers=2, **more):
    """State of a node with two workers, as its launcher sends it."""
    running = [
        {"rank": rank, "pid": 100 + rank, "section": "step", "seconds": 0.5, "waits": rank > 0, "ready": True}
        | {"joins": False, "iteration": 9}
        for rank in range(workers)
    ]
    state = {"node": 0, "per_node": 2, "leader": 0, "lease_s": 12.5, "workers": running}
    return state | {"control": control(generation, **more)}


class Monitored:
    """A monitor process with ports that the system chooses; a context, at whose end the pipe is closed."""

    def __init__(self, directory, *flags, token=None, address="127.0.0.1"):
        self.directory, self.events = directory / "moc-monitor-x", directory / "log" / "events.jsonl"
        self._console = directory / "console"
        for made in (self.directory, self.events.parent):
            made.mkdir(parents=True)
        os.symlink(self.events, self.directory / EVENTS_LINK)
        ports = [] if "--metrics-port" in flags else ["--metrics-port", "0", "--dashboard-port", "0"]
        where = ["--directory", str(self.directory), "--address", address, "--since", "0"]
        environment = os.environ | ({} if token is None else {"MOC_MONITOR_TOKEN": token})
        with open(self._console, "w") as console:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moc.monitor.server", *where, *ports, *flags],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=console,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        """Closes the pipe, as a launcher does at its end; returns the exit code."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()

    @property
    def console(self):
        return self._console.read_text()

    def port(self, name):
        """Waits until the monitor has reported a port."""
        return int(self.until(lambda: re.findall(rf"{name}: http://[^/]*:(\d+)/", self.console))[-1])

    def until(self, condition):
        """Waits until a condition holds; returns its value."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := condition()):
            assert time.monotonic() < deadline, self.console
            time.sleep(0.05)
        return value

    def send(self, **state):
        """Sends a state as the launcher does."""
        self.process.stdin.write(json.dumps(state) + "\n")
        self.process.stdin.flush()

    def write(self, events):
        """Appends events to the file."""
        with open(self.events, "a") as file:
            file.writelines(json.dumps(event) + "\n" for event in events)

    def get(self, path="/", name="dashboard", method="GET", **headers):
        """Returns status and text of an answer, and its headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port(name), timeout=PATIENCE_S)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        with contextlib.closing(connection):
            return answer.status, answer.read().decode(), answer.headers

    def metrics(self):
        """Returns the values of all series, by name and labels."""
        return parse_metrics(self.get("/metrics", "metrics")[1])


def parse_metrics(text):
    """Returns the values of a text of Prometheus, by name and labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def assert_metrics_equal_events(metrics, events):
    """Compares all metrics that events determine, without tolerance."""
    state = fold_events(events)
    for part, seconds in vars(state.spent).items():
        assert metrics[f'moc_wall_clock_seconds{{part="{part.removesuffix("_s")}"}}'] == seconds
    for kind, totals in state.totals.items():
        assert metrics[f'moc_events_total{{type="{kind}"}}'] == totals.count
    newest = state.newest["iteration"]
    snapshots, stalls = state.of_type("snapshot"), state.of_type("stall")
    expected = {
        "moc_iteration": state.last_iteration,
        "moc_loss_nats_per_token": newest["loss"],
        "moc_gradient_norm": newest["grad_norm"],
        "moc_tokens": state.tokens,
        "moc_iterations_computed_total": state.computed,
        "moc_ettr_ratio": state.ettr,
        "moc_recoveries_total": len(state.recoveries),
        "moc_iterations_repeated_total": sum(one.repeated for one in state.recoveries),
        "moc_stall_seconds_total": stalls.sum("seconds"),
        'moc_operation_bytes_total{operation="copy"}': snapshots.sum("bytes"),
        'moc_operation_seconds_total{operation="copy"}': snapshots.sum("copy_s"),
    }
    assert {name: metrics[name] for name in expected} == expected
