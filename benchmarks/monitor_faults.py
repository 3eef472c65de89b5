"""Kills workers of a monitored job, and compares its metrics with its events.

    python benchmarks/monitor_faults.py --kills 100 --output docs/results/monitor_faults_cpu.json

A scraper reads the metrics ten times a second and a page is open all the time.  Workers are killed in turn, and the
monitor itself at every tenth kill of the first half.  At the end, metrics must equal the sums over the lines of
``events.jsonl``, without tolerance, and the job must end with code 0.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.live.job import IN_MEMORY, MODEL, PATIENCE_S, PROGRAM, Job, launcher
from moc.files.event_log import losses_of

BETWEEN = 3  # iterations from one kill to the next
LAST = 80  # iterations after the last kill that compare metrics
STOPPED_S = 10.0  # less than --silence-timeout


def expected(events: Sequence[Mapping]) -> dict[str, float]:
    """Returns the metrics that the lines of a file add up to."""
    counts = Counter(event["type"] for event in events)
    values = {f'moc_events_total{{type="{kind}"}}': float(count) for kind, count in counts.items()}
    causes = Counter(loss.cause for event in events for loss in losses_of(event))
    values |= {f'moc_losses_total{{cause="{cause}"}}': float(count) for cause, count in causes.items()}
    copied = [event for event in events if event["type"] == "snapshot"]
    newest = next(event for event in reversed(events) if event["type"] == "iteration")
    return values | {
        "moc_iteration": float(newest["iteration"]),
        "moc_loss_nats_per_token": newest["loss"],
        "moc_gradient_norm": newest["grad_norm"],
        'moc_operation_bytes_total{operation="copy"}': float(sum(event["bytes"] for event in copied)),
        "moc_iterations_computed_total": float(counts["iteration"]),
    }


def parse(text: str) -> dict[str, float]:
    """Returns the values of a text of Prometheus, by name and labels."""
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


class Readers:
    """A scraper and an open page of a job; they find the monitor again after it was killed."""

    def __init__(self, job: Job):
        self._job, self._ended = job, threading.Event()
        self.scrapes = self.updates = 0
        for target in (self._scrape, self._follow):
            threading.Thread(target=target, daemon=True).start()

    def url(self, name: str) -> str:
        """Returns the newest address of the page or of the metrics."""
        said = "\n".join(line for _, line in self._job.said)
        return re.findall(rf"{name}: (http\S+)", said)[-1]

    def metrics(self) -> dict[str, float]:
        """Returns the metrics now."""
        with urllib.request.urlopen(self.url("metrics"), timeout=10) as answer:
            return parse(answer.read().decode())

    def answers(self) -> bool:
        """Returns whether the monitor runs."""
        with contextlib.suppress(OSError):
            return bool(self.metrics())
        return False

    def end(self) -> None:
        """Ends both."""
        self._ended.set()

    def _scrape(self) -> None:
        while not self._ended.wait(0.1):
            with contextlib.suppress(OSError, IndexError, ValueError):
                self.scrapes += bool(self.metrics())

    def _follow(self) -> None:
        while not self._ended.wait(0.1):
            with (
                contextlib.suppress(OSError, IndexError, ValueError),
                urllib.request.urlopen(self.url("dashboard") + "updates", timeout=10) as answer,
            ):
                while not self._ended.is_set() and (line := answer.readline()):
                    self.updates += line.startswith(b"data: ")


def differences(readers: Readers, job: Job) -> Mapping[str, tuple[float | None, float]]:
    """Returns metrics that differ from the events, while all workers are stopped for a moment."""
    job.wait_for(readers.answers, "a monitor")  # it starts again after a kill
    workers = [psutil.Process(pid) for pid in job.workers().values()]
    for worker in workers:
        worker.suspend()
    try:
        deadline, wrong = time.monotonic() + STOPPED_S, {"metrics": (None, 0.0)}
        while wrong and time.monotonic() < deadline:
            time.sleep(0.1)  # the monitor reads new events four times a second
            values, found = expected(job.events.all()), readers.metrics()
            wrong = {name: (found.get(name), value) for name, value in values.items() if found.get(name) != value}
        return wrong
    finally:
        for worker in workers:
            worker.resume()


def main() -> int:
    """Kills, compares, writes JSON; returns 1 if a metric differs or the job fails."""
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=100, help="default: 100")
    own = parser.parse_args()
    ports = ["--metrics-port", "0", "--dashboard-port", "0", "--max-restarts", str(10 * own.kills)]
    iterations = own.kills * BETWEEN + LAST
    command = [*launcher(2), *ports, PROGRAM, *MODEL, *IN_MEMORY, "--train-iters", str(iterations)]
    monitors = 0
    with tempfile.TemporaryDirectory(prefix="monitor-faults-") as files, Job(command, files, saves=True) as job:
        job.reach(BETWEEN)
        readers = Readers(job)
        for kill in range(own.kills):
            os.kill(job.workers()[kill % 2], signal.SIGKILL)
            job.wait_for(lambda kill=kill: len(job.events.of("generation")) > kill, f"generation {kill + 1}")
            job.reach(job.iteration + BETWEEN)
            if kill % 10 == 4 and 2 * kill < own.kills:  # the launcher starts it again after ever longer pauses
                monitors += kill_monitor(job)
            if kill % 10 == 9:
                print(f"{kill + 1} kills, {readers.scrapes} scrapes, {readers.updates} updates", flush=True)
        wrong = differences(readers, job)
        readers.end()
        code = job.process.wait(PATIENCE_S)
        lost = len(job.events.of("generation"))
    for name, (found, value) in wrong.items():
        print(f"{name}: {found} in the metrics, {value} in the events")
    result = {"kills": own.kills, "monitors_killed": monitors, "scrapes": readers.scrapes, "updates": readers.updates}
    write_json(own.output, {"machine": machine()} | result | {"wrong": wrong, "exit_code": code})
    verdicts = {"metrics equal events": not wrong, "the job ends well": code == 0, "no other loss": lost == own.kills}
    return 0 if say(verdicts) else 1


def kill_monitor(job: Job) -> int:
    """Kills the monitor of a job; returns how many were killed."""
    found = [
        one for one in psutil.Process(job.process.pid).children() if "moc.monitor.server" in " ".join(one.cmdline())
    ]
    for one in found:
        one.kill()
    return len(found)


if __name__ == "__main__":
    sys.exit(main())
