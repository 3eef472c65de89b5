"""Injects random losses, departures and growths into an elastic job, and compares it with a job of fixed members.

    python benchmarks/elastic_faults.py --seed 1 --events 15 --output docs/results/elastic_faults_cpu.json --append

A tiny model with dropout trains on MIN to MAX nodes.  Each node is a launcher with one worker, its own temporary files
and a candidate for the controller.  The seed determines all events: all processes of a node, its launcher or its worker
are killed, a node is asked to leave, or returns.  About 60 % of the events occur while an earlier one is in progress,
half of these while experts move; ``--inject slow`` extends the moves.  Fewer than f nodes are lost simultaneously.

At the end the job is asked to stop.  A run passes if

* the losses of all iterations are within 1e-6 of a job with fixed members.  Both jobs record where each token goes
  (benchmarks/live/routing.py).  If two experts' logits differed by at most MARGIN, and rounding sent a token elsewhere,
  this holds up to that iteration, and later losses are within AFTER_A_TIE;
* no iteration was computed twice or omitted, no checkpoint was read, and only killed workers were replaced;
* all launchers exited with the code of a saved job, departed nodes with their own code, and the last snapshot is
  valid;
* no processes, shared memory or temporary files remain.

Stalls are measured by the clock of each surviving training thread: the longest time between the ends of two iterations
around an event, less the median of all such times.  The files of a failed run are kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, write_json
from benchmarks.faults.members import COMES, LEAVES, LOSSES, MOMENTS, MOVE, SETTLED, Cluster, Happening, drawn, moment
from benchmarks.faults.run import damages, standing
from benchmarks.faults.ties import Key, Routed, decided, parting, read
from benchmarks.live.job import KIND, ROOT, SHARED, WORKER
from benchmarks.live.members import Nodes
from moc.runtime.termination import DEPARTED, SAVED

PROGRAM = str(ROOT / "benchmarks/live/routing.py")
CLOSE, AFTER_A_TIE = 1e-6, 1e-3
MARGIN = 1e-5
"""Largest distance of two logits that rounding may reorder: each logit varies by up to 2.5e-6 between memberships."""
MOVES_S = 0.1  # delay of each layer of a move, applied twice
CHANGE_S = 4.0  # approximate duration of a change
CLUSTER = Cluster(nodes=5, least=3, slots=6, experts=8, replicas=3)
MODEL = f"""--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-experts {CLUSTER.experts} --seq-length 32
    --max-position-embeddings 32 --vocab-size 255 --micro-batch-size 1 --global-batch-size 12 --lr 1e-3
    --hidden-dropout 0.1 --attention-dropout 0.1 --calculate-per-token-loss --exit-signal-handler --log-interval 1
    --elastic --elastic-slots {CLUSTER.slots} --elastic-min-replicas {CLUSTER.replicas}
    --elastic-rebalance-interval 10 --ckpt-policy full --ckpt-tier disk --snapshot-interval 50""".split()


@dataclass
class Row:
    """Outcome of one run."""

    seed: int
    happened: list[dict] = field(default_factory=list)  # each event with the phase of the job
    members: list[int] = field(default_factory=list)  # workers at each start
    migrations: int = 0
    iterations: int = 0
    difference: float = 0.0  # largest difference of a loss before the first tie
    ties: list[dict] = field(default_factory=list)  # first routing choices that differ between the runs, if any
    difference_after: float = 0.0  # largest difference of a loss from the tie on
    wrong: list[str] = field(default_factory=list)  # failed checks; empty if the run passed
    left: list[str] = field(default_factory=list)  # leftovers of the job
    stand: list[str] = field(default_factory=list)  # states of the processes, if the job hung
    seconds: float = 0.0
    stalls: list[dict] = field(default_factory=list)  # of each event: action, moment, and seconds of the longest stall


@dataclass(frozen=True)
class Told:
    """Losses and token routes of the job with fixed members."""

    losses: list[float]
    routes: dict[Key, Routed]


class Run:
    """One job and the events injected into it.

    Args:
        own: flags of the benchmark.
        directory: for the job's files; created.
        stack: its exit ends the job.
    """

    def __init__(self, own: argparse.Namespace, directory: Path, stack: ExitStack):
        directory.mkdir(parents=True)
        self._own, self._directory, self.row = own, directory, Row(own.seed)
        self._memory = Path(tempfile.mkdtemp(prefix="elastic-faults-", dir=SHARED))
        stack.callback(shutil.rmtree, self._memory, ignore_errors=True)
        counts = [f"{CLUSTER.least}:{CLUSTER.nodes}", "--nproc-per-node", 1]
        launcher = ["--nnodes", *counts, "--grow-wait", 1, "--silence-timeout", own.silence]
        launcher += ["--drain-seconds", own.limit]
        launcher += ["--max-standstill", 1000]  # faults may strike at one iteration again and again
        places = ["--ckpt-dir", directory / "snapshots", "--ckpt-memory-dir", self._memory]
        slow = [
            f"slow node={node} iteration=0 point={point} seconds={MOVES_S} times=100000"
            for point in ("rebalancing", "landed")
            for node in range(CLUSTER.nodes)
            if point == "rebalancing" or node % 2
        ]
        ends = ["--train-iters", own.iterations, "--inject", "; ".join(slow)]
        program = [PROGRAM, *KIND, *MODEL, *places, *ends]
        self.routes = directory / "routes"
        self.routes.mkdir()
        os.environ["ROUTES"] = str(self.routes)
        self.nodes = Nodes(program, directory, stack, launcher, CLUSTER.nodes, candidates=CLUSTER.nodes)
        self._last, self._reached, self._leaving = None, 0, set[int]()

    def meets(self, happening: Happening) -> None:
        """Waits until a loss or growth is due, then causes it."""
        self._wait(lambda: self._is_time(happening), f"{happening}")
        did = moment(self.nodes.events.all(), self._last, len(self.nodes.present))
        told = {"action": happening.action, "node": happening.node, "iteration": self.nodes.iteration, "moment": did}
        told["at"] = time.monotonic()
        self._last, self._reached = time.time(), self.nodes.iteration
        self.row.happened.append(told)
        if happening.action == COMES:
            if happening.node in self._leaving:
                self._has_left(happening.node)
            self.nodes.start(happening.node)
        elif happening.action == LEAVES:
            self.nodes.ask_to_leave(happening.node)
            self._leaving.add(happening.node)
        elif happening.action == "worker":
            worker = self.nodes.worker(happening.node)
            if worker is not None:
                worker.kill()
        else:
            self.nodes.lose(happening.node, at_once=happening.action == "node")

    def _has_left(self, node: int) -> None:
        self._wait(lambda: self.nodes.jobs[node].process.poll() is not None, f"departure of node {node}")
        if (code := self.nodes.left_with(node)) != DEPARTED:
            self.row.wrong.append(f"node {node} was asked to leave, and exited with {code}")
        self._leaving.discard(node)

    def trains_to_its_end(self) -> None:
        """Waits for the last iteration without disturbing the job."""
        for iteration in range(1, self._own.iterations + 1):
            self._wait(lambda at=iteration: self.nodes.iteration >= at, f"iteration {iteration}")

    def ends(self) -> None:
        """Waits for the last change, then asks the job to stop."""
        for node in sorted(self._leaving):
            self._has_left(node)
        self._wait(self._settled, "the last change")
        self.nodes.jobs[min(self.nodes.present)].process.send_signal(signal.SIGTERM)
        self._wait(lambda: None not in self.nodes.ended().values(), "the end")

    def _is_time(self, happening: Happening) -> bool:
        if self._last is None:
            return self.nodes.iteration >= 2 + 3 * happening.share
        spent, settled = time.time() - self._last, self._settled()
        if happening.when == SETTLED:
            return settled and self.nodes.iteration >= self._reached + 2 + 4 * happening.share
        if happening.when == MOVE:
            moves = [e["time"] for e in self.nodes.events.of("inject") if e["time"] > self._last]
            return settled or bool(moves) and time.time() >= moves[0] + 3 * MOVES_S * happening.share
        return settled or spent >= happening.share * CHANGE_S

    def _settled(self) -> bool:
        """Whether all present nodes train and have completed iterations since the last change."""
        there = len(self.nodes.present)
        return self.nodes.size == there and self.nodes.iteration >= self._reached + (2 if self._last else 1)

    def _wait(self, ready, what: str) -> None:
        """Waits for a condition; raises TimeoutError after the limit."""
        deadline = time.monotonic() + self._own.limit
        while not ready():
            codes = self.nodes.ended()
            if what != "the end" and any(code is not None for code in codes.values()):
                raise TimeoutError(f"launchers have ended before {what}: {codes}")
            if time.monotonic() > deadline:
                self.row.stand = [
                    line
                    for node in sorted(self.nodes.present)
                    for line in standing(_processes(self.nodes.jobs[node].process.pid))
                ]
                raise TimeoutError(f"no {what} after {self._own.limit:g} s, at iteration {self.nodes.iteration}")
            time.sleep(0.01)

    def judged(self, expected: Told) -> Row:
        """Returns the outcome, compared with the job with fixed members."""
        row, events = self.row, self.nodes.events
        told = [event["iteration"] for event in events.of("iteration")]
        losses = [event["loss"] for event in events.of("iteration")]
        row.iterations, row.members = max(told, default=0), [event["world_size"] for event in events.of("start")]
        row.migrations = len(events.of("migration"))
        times = [[*map(float, path.read_text().split())] for path in self.routes.glob("*.times")]
        row.stalls = [
            {k: e[k] for k in ("action", "moment")} | {"seconds": stall(times, e["at"])} for e in row.happened
        ]
        row.wrong += [] if told == [*range(1, len(told) + 1)] else ["iterations were computed twice, or left out"]
        row.wrong += [] if len(told) <= len(expected.losses) else [f"raise --iterations above {len(told)}"]
        self._compare(losses, expected)
        row.wrong += [f"a checkpoint was read: {event['reason']}" for event in events.of("fallback")]
        row.wrong += [
            f"state was loaded from {e['tier']}" for e in events.of("resume") if e["tier"] not in ("live", None)
        ]
        codes = self.nodes.ended()
        row.wrong += [] if set(codes.values()) == {SAVED} else [f"exit codes {codes}"]
        row.wrong += damages(self._directory / "snapshots") + self._replaced()
        row.left = self.nodes.left() + [f"{path} is left" for path in self._memory.rglob("*") if path.is_file()]
        return row

    def _compare(self, losses: list[float], expected: Told) -> None:
        row, both = self.row, min(len(losses), len(expected.losses))
        differences = [abs(a - b) for a, b in zip(losses, expected.losses, strict=False)]
        try:
            choices = parting(read(self.routes), expected.routes, both)
        except KeyError as missing:
            row.wrong.append(
                f"no worker recorded the routes of the tokens of iteration, micro batch and layer {missing}"
            )
            return
        alike = choices[0].iteration - 1 if choices else both
        row.ties = [asdict(choice) for choice in choices]
        row.difference = max(differences[:alike], default=0.0)
        row.difference_after = max(differences[alike:], default=0.0)
        row.wrong += [f"token {one} goes elsewhere, and not by rounding" for one in decided(choices, MARGIN)]
        row.wrong += [] if row.difference <= CLOSE else [f"a loss differs by {row.difference:.2g}"]
        row.wrong += [] if row.difference_after <= AFTER_A_TIE else [f"a loss differs by {row.difference_after:.2g}"]

    def _replaced(self) -> list[str]:
        """Returns workers that were restarted although they were not killed."""
        console = self.nodes.console().splitlines()
        started = Counter(int(line.split()[2].rstrip(":")) for line in console if WORKER.search(line))
        may = Counter(one["node"] for one in self.row.happened if one["action"] in (COMES, "worker"))
        more = {node: number - 1 - may[node] for node, number in started.items() if number - 1 > may[node]}
        return [f"node {node} has had {number} workers too many" for node, number in more.items()]


def stall(times: list[list[float]], at: float) -> float | None:
    """Returns the longest additional time between two iterations of a training thread, around an event.

    Args:
        times: by thread, the times at which its iterations ended, in order.
        at: time of the event.
    """
    gaps = [later - earlier for ends in times for earlier, later in itertools.pairwise(ends)]
    around = [later - earlier for ends in times for earlier, later in itertools.pairwise(ends) if earlier <= at < later]
    return round(max(around) - statistics.median(gaps), 3) if around else None


def _processes(pid: int):
    import psutil

    launcher = psutil.Process(pid)
    return [launcher, *launcher.children(recursive=True)]


def fixed(own: argparse.Namespace, directory: Path) -> Told:
    """Runs the job with fixed members; cached in the directory."""
    known = directory / f"fixed-{own.iterations}"
    if not known.exists():
        with ExitStack() as stack:
            run = Run(own, directory / "fixed", stack)
            run.trains_to_its_end()
            losses = [event["loss"] for event in run.nodes.events.of("iteration")]
        (run.routes / "losses.json").write_text(json.dumps(losses))
        run.routes.rename(known)
        shutil.rmtree(directory / "fixed")
    return Told(json.loads((known / "losses.json").read_text()), read(known))


def disturbed(own: argparse.Namespace, directory: Path, expected: Told) -> Row:
    """Runs one job with the events of its seed."""
    begun = time.monotonic()
    with ExitStack() as stack:
        run = Run(own, directory, stack)
        try:
            for happening in drawn(random.Random(own.seed), own.events, CLUSTER):
                if run.nodes.iteration > own.iterations - 60:
                    break
                run.meets(happening)
            run.ends()
        except TimeoutError as late:
            run.row.wrong.append(str(late))
        time.sleep(0.5)  # the kernel needs a moment to end orphaned processes
        row = run.judged(expected)
        (directory / "console").write_text(run.nodes.console())
    row.seconds = round(time.monotonic() - begun, 1)
    return row


def summary(rows: list[Row]) -> dict:
    """Summarizes all runs."""
    happened = [one for row in rows for one in row.happened]
    return {
        "runs": len(rows),
        "as fixed members": sum(not row.wrong and not row.left for row in rows),
        "wrong": sum(bool(row.wrong) for row in rows),
        "stood still": sum(bool(row.stand) for row in rows),
        "leftovers": sum(bool(row.left) for row in rows),
        "events": len(happened),
        "by kind": {action: counted(happened, action) for action in (*LOSSES, LEAVES, COMES)},
        "stalls in training, in seconds": {action: spread(rows, action) for action in (*LOSSES, LEAVES, COMES)},
        "iterations": sum(row.iterations for row in rows),
        "changes": sum(len(row.members) - 1 for row in rows),
        "moves of experts": sum(row.migrations for row in rows),
        "largest difference of a loss": max((row.difference for row in rows), default=0.0),
        "with a tie": sum(bool(row.ties) for row in rows),
        "largest difference of a loss after a tie": max((row.difference_after for row in rows), default=0.0),
    }


def counted(happened: list[dict], action: str) -> dict[str, int]:
    """Counts the events of one kind, by the phase of the job."""
    found = Counter(one["moment"] for one in happened if one["action"] == action)
    return {did: found[did] for did in MOMENTS}


def spread(rows: list[Row], action: str) -> dict[str, float | int]:
    """Returns number, median and maximum of the stalls by events of one kind while all nodes trained."""
    of_kind = [one for row in rows for one in row.stalls if one["action"] == action and one["moment"] == MOMENTS[0]]
    seconds = [one["seconds"] for one in of_kind if one["seconds"] is not None]
    if not seconds:
        return {"number": 0}
    return {"number": len(seconds), "median": round(statistics.median(seconds), 3), "most": max(seconds)}


def write(own: argparse.Namespace, rows: list[Row]) -> None:
    """Writes the outcomes of all runs; with ``--append``, keeps the file's other runs."""
    if own.append and own.output and own.output.exists():
        seeds = {row.seed for row in rows}
        there = [Row(**run) for run in json.loads(own.output.read_text())["runs"]]
        rows = [row for row in there if row.seed not in seeds] + rows
    flags = {name: getattr(own, name) for name in ("events", "iterations", "silence")}
    told = {"machine": machine(), "flags": flags, "job": asdict(CLUSTER), "summary": summary(rows)}
    write_json(own.output, told | {"runs": [asdict(row) for row in rows]})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next has the next one")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--events", type=int, default=15, help="of each run (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=400, help="at most, of a run (default: %(default)s)")
    parser.add_argument("--silence", type=float, default=20.0, help="seconds after which a silent node is lost")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which a change hangs")
    parser.add_argument("--directory", type=Path, help="for the files of runs; by default a temporary one")
    parser.add_argument("--append", action="store_true", help="add the runs to those in --output")
    return parser.parse_args(arguments)


def main() -> int:
    """Runs the campaign; returns 1 if a run failed."""
    own, rows = parse(), []
    directory = own.directory or Path(tempfile.mkdtemp(prefix="elastic-faults-"))
    directory.mkdir(parents=True, exist_ok=True)
    expected = fixed(own, directory)
    for _ in range(own.runs):
        place = directory / f"seed-{own.seed}-{time.monotonic_ns()}"
        row = disturbed(own, place, expected)
        rows.append(row)
        wrong = row.wrong + row.left
        what = f"within {row.difference:.1e} of fixed members" if not wrong else f"FAILED: {wrong} (see {place})"
        what += f", {row.difference_after:.1e} from a tie in {row.ties[0]['iteration']} on" if row.ties else ""
        print(f"seed {own.seed}: {len(row.happened)} events, {row.seconds:.0f} s, {row.members}: {what}", flush=True)
        if not wrong:
            shutil.rmtree(place)
        own.seed += 1
        write(own, rows)
    print(json.dumps(summary(rows), indent=1))
    failed = any(row.wrong or row.left for row in rows)
    if own.directory is None and not failed:
        shutil.rmtree(directory)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
