"""Traces of spot instances, replayed with real jobs: what is trained while nodes are taken away and come back.

    python benchmarks/spot_replay.py --directory TRACES --output docs/results/spot_replay_cpu.json
    python benchmarks/spot_replay.py --directory TRACES --only aws_p3 --seconds 60

``TRACES`` has Bamboo's ``aws_p3.csv`` (its first 80 minutes, 20 times as fast) and ``gcp_a100.txt`` (4 hours, 60 times
as fast).  As many nodes are there as the trace has, scaled to six at its most: launchers on this machine with a worker
each, which are killed with all their processes and started again.  The controller is on none of them.  One after the
other, with the same losses; the trace begins when some iterations are done, and for a job of fixed size that has not
enough nodes then, at once:

* ``in process``: ``--elastic``, on 2 to 6 nodes;
* ``fixed size``: a job of ``--fixed`` nodes, the others being spares; it waits where fewer are there;
* ``multiples``: expert parallelism of two, on 2 to 6 nodes: all workers are started anew from a checkpoint, on two,
  four or six nodes.

All save every ``--interval`` iterations to disk.  *Samples* are those of iterations that count, once each.  The
simulator's forecast is that of ``tools/simulate.py`` for the same losses, with the job's own iterations and with what
``--regroup`` and ``--restart`` say of changes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, write_json
from benchmarks.live.job import KIND, PROGRAM
from benchmarks.live.members import Nodes
from megatron.pretraining.planning import simulate
from moc.report.members import periods, seconds_by_workers
from moc.simulate.failures import Trace, read_trace

NODES, LEAST, BATCH, GPUS = 6, 2, 12, 8  # GPUs of a node of the simulator
WARM_UP = 6
"""Iterations before the trace begins."""
TRACES = {"aws_p3": ("aws_p3.csv", 4800.0, 20.0), "gcp_a100": ("gcp_a100.txt", 14400.0, 60.0)}
"""By name, the file, the seconds of it that are replayed, and how many times as fast."""
MODEL = f"""--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-experts 8 --seq-length 64
    --max-position-embeddings 64 --vocab-size 255 --micro-batch-size 1 --global-batch-size {BATCH} --lr 1e-4
    --train-iters 100000 --calculate-per-token-loss --exit-signal-handler --ckpt-policy full --ckpt-tier disk
    --ckpt-keep 2""".split()
WAYS = {  # by name, flags of the program
    "in process": ["--elastic", "--elastic-slots", "6"],
    "fixed size": [],
    "multiples": ["--expert-model-parallel-size", "2"],
}
FORECAST = {"in process": "elastic", "fixed size": "full", "multiples": "full+shrink"}
"""The simulator's policy of each way."""


@dataclass(frozen=True)
class Change:
    """So many nodes are there from a moment on, in seconds since the replay began."""

    at_s: float
    nodes: int


@dataclass
class Told:
    """What a job has done with a trace."""

    samples: int = 0
    seconds: float = 0.0
    losses: int = 0  # nodes that were lost
    came: int = 0
    survived: int = 0  # losses after which no checkpoint was read
    fallbacks: list[str] = field(default_factory=list)  # reasons
    again: int = 0  # iterations computed again
    launchers: int = 0  # that ended by themselves, and were started again
    iteration_s: float = 0.0  # in the median, while most nodes trained
    most: int = 0  # these nodes
    workers_s: dict[int, float] = field(default_factory=dict)  # by number of workers, seconds that they trained


def changes(trace: Trace, length_s: float, scale: float, most: int = NODES) -> tuple[Change, ...]:
    """The nodes of a trace that are there, scaled to ``most``; the first is at 0.

    Args:
        trace: as recorded.
        length_s: of it that is replayed.
        scale: how many times as fast.
        most: nodes where the trace has most in that time.
    """
    alive, counts = trace.nodes, [(0.0, trace.nodes)]
    for event in trace.events:
        if event.at_s <= length_s:
            alive += event.gained - event.lost
            counts.append((event.at_s, alive))
    highest = max(count for _, count in counts)
    found: list[Change] = []
    for at_s, count in counts:
        nodes = round(most * count / highest)
        if not found or found[-1].nodes != nodes:
            found.append(Change(at_s / scale, nodes))
    return tuple(found)


def as_trace(of: Sequence[Change]) -> Iterator[str]:
    """The same in Bamboo's format, node by node, for the simulator."""
    there: list[int] = []
    for change in of:
        for node in range(len(there), change.nodes):
            there.append(node)
            yield f"{round(1000 * change.at_s)},add,node{node}"
        while len(there) > change.nodes:
            yield f"{round(1000 * change.at_s)},remove,node{there.pop()}"


class Replay:
    """One job, under the losses of a trace.

    Args:
        own: flags of the benchmark.
        way: one of :data:`WAYS`.
        of: the nodes that are there.
        seconds: of the replay.
    """

    def __init__(self, own: argparse.Namespace, way: str, of: Sequence[Change], seconds: float):
        self._own, self._way, self._of, self._seconds = own, way, of, seconds
        self._chance, self._told = random.Random(own.seed), Told()

    def run(self, files: Path, stack: ExitStack) -> Told:
        """Replays the trace; what the job has done."""
        told, nodes = self._told, self._start(files, stack)
        deadline = time.monotonic() + 180
        begins = self._way != "fixed size" or self._of[0].nodes >= self._own.fixed
        while begins and nodes.iteration < WARM_UP:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._way} does not begin:\n{nodes.console()[-4000:]}")
            time.sleep(0.05)
        began, before = time.time(), nodes.iteration
        waiting = list(self._of[1:])
        while (now := time.time() - began) < self._seconds:
            if waiting and now >= waiting[0].at_s:
                self._change(nodes, waiting.pop(0).nodes)
            self._start_what_ended(nodes)
            time.sleep(0.02)
        events = nodes.events.all()
        trained = [e for e in events if e["type"] == "iteration" and e["time"] <= began + self._seconds]
        told.samples = BATCH * (max((event["iteration"] for event in trained), default=before) - before)
        told.again = len(trained) - len({event["iteration"] for event in trained})
        if trained:
            told.most, told.iteration_s = on_most(events)
        told.fallbacks = [event["reason"] for event in nodes.events.of("fallback")]
        resumed = [event for event in nodes.events.of("resume") if event["time"] > began]
        told.survived = max(0, told.losses - sum(event["tier"] != "live" for event in resumed))
        told.seconds = self._seconds
        of_workers = seconds_by_workers(periods(events, events[0]["time"]))
        told.workers_s = {workers: round(spent, 1) for workers, spent in of_workers.items()}
        return told

    def _start(self, files: Path, stack: ExitStack) -> Nodes:
        places = [f"{LEAST}:{NODES}", "--spares", 0]
        if self._way == "fixed size":
            places = [self._own.fixed, "--spares", NODES - self._own.fixed]
        counts = ["--nnodes", *places, "--nproc-per-node", 1, "--grow-wait", self._own.grow_wait]
        launcher = [*counts, "--silence-timeout", self._own.silence]
        saves = ["--ckpt-dir", files / "snapshots", "--snapshot-interval", self._own.interval]
        program = [PROGRAM, *KIND, *MODEL, *WAYS[self._way], *saves]
        return Nodes(program, files, stack, launcher, self._of[0].nodes, candidates=0)

    def _change(self, nodes: Nodes, wanted: int) -> None:
        while len(nodes.present) > wanted:
            nodes.lose(self._chance.choice(sorted(nodes.present)))
            self._told.losses += 1
        for node in sorted(set(range(NODES)) - nodes.present)[: wanted - len(nodes.present)]:
            nodes.start(node)
            self._told.came += 1

    def _start_what_ended(self, nodes: Nodes) -> None:
        for node, code in nodes.ended().items():
            if code is not None:
                nodes.lose(node)
                nodes.start(node)
                self._told.launchers += 1


def on_most(events: Sequence[dict]) -> tuple[int, float]:
    """The most workers that have trained, and the median of the seconds of their iterations."""
    workers, taken = 0, dict[int, list[float]]()
    for event in events:
        if event["type"] == "start":
            workers = event["world_size"]
        elif event["type"] == "iteration":
            taken.setdefault(workers, []).append(event["elapsed_s"])
    return max(taken), round(median(taken[max(taken)]), 4)


def forecast(own: argparse.Namespace, of: Sequence[Change], way: str, told: Told, files: Path) -> dict:
    """What the simulator says of the same losses, with the job's iterations: samples, and what came from storage."""
    nodes = own.fixed if way == "fixed size" else NODES
    iteration_s = told.iteration_s * -(-BATCH // nodes) / -(-BATCH // told.most)  # in rounds of micro batches
    trace = files / "trace.csv"
    trace.write_text("\n".join([*as_trace(of), ""]))
    command = [
        "--model",
        "micro",
        "--cluster",
        f"a100-80gb:{GPUS * nodes}",
        "--trace",
        trace,
        "--trace-nodes",
        "--json",
    ]
    command += ["--hours", told.seconds / 3600, "--iteration-s", f"{iteration_s:.4f}s", "--restart", f"{own.restart}s"]
    command += ["--policy", FORECAST[way], "--min-nodes", min(LEAST, nodes), "--grow-wait", f"{own.grow_wait}s"]
    command += [
        "--elastic-regroup",
        f"{own.regroup}s",
        "--global-batch-size",
        GPUS * BATCH,
        "--micro-batch",
        1,
        "--runs",
        1,
    ]
    if way != "in process":
        command += ["--interval", own.interval]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = simulate.main(list(map(str, command)))
    if code:
        raise RuntimeError(f"the simulator refuses: {said.getvalue()}")
    (found,) = json.loads(said.getvalue())["policies"].values()
    return {"samples": found["samples"] / GPUS} | {name: found[name] for name in ("fallbacks", "nodes_s", "ettr")}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="with the traces' files")
    parser.add_argument("--only", choices=TRACES, help="one of the traces")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, help="of each replay; by default as long as the slice takes")
    parser.add_argument("--scale", type=float, help="how many times as fast; by default 20 and 60")
    parser.add_argument("--fixed", type=int, default=4, help="nodes of the job of fixed size (default: %(default)s)")
    parser.add_argument("--interval", type=int, default=10, help="iterations between snapshots (default: %(default)s)")
    parser.add_argument(
        "--grow-wait", type=float, default=2.0, help="seconds, as the launcher's (default: %(default)s)"
    )
    parser.add_argument("--silence", type=float, default=20.0, help="seconds, as the launcher's (default: %(default)s)")
    parser.add_argument("--regroup", type=float, default=1.0, help="forecast: seconds of a change in process")
    parser.add_argument("--restart", type=float, default=2.0, help="forecast: seconds of a start anew")
    parser.add_argument("--seed", type=int, default=0, help="of which nodes are lost")
    return parser.parse_args(arguments)


def main() -> None:
    """Replays the traces with each way, and writes what came of it."""
    own, told = parse(), {}
    for name in [own.only] if own.only else TRACES:
        file, length_s, scale = TRACES[name]
        scale = own.scale or scale
        seconds = own.seconds or length_s / scale
        of = changes(read_trace(own.directory / file), seconds * scale, scale)
        told[name] = {"scale": scale, "seconds": seconds, "changes": [asdict(change) for change in of], "ways": {}}
        for way in own.ways:
            with tempfile.TemporaryDirectory(prefix="spot-replay-") as files, ExitStack() as stack:
                found = Replay(own, way, of, seconds).run(Path(files), stack)
                said = forecast(own, of, way, found, Path(files)) if found.most else None
                told[name]["ways"][way] = asdict(found) | {"forecast": said}
            print(f"{name}, {way}: {found}", flush=True)
            write_json(own.output, {"machine": machine(), "traces": told})


if __name__ == "__main__":
    main()
