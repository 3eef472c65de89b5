"""Traces of spot instances, replayed with real jobs: what is trained while nodes are taken away and come back.

    python benchmarks/spot_replay.py --directory TRACES --output docs/results/spot_replay_cpu.json
    python benchmarks/spot_replay.py --directory TRACES --only aws_p3 --seconds 60

``TRACES`` has Bamboo's ``aws_p3.csv`` (its first 80 minutes, 20 times as fast) and ``gcp_a100.txt`` (4 hours, 60 times
as fast).  As many nodes are there as the trace has, scaled to six at its most: launchers on this machine with a worker
each, which are killed with all their processes and started again.  The controller is on none of them.  Side by side, so
that whatever else the machine does meets all alike, and with the same losses; the trace begins when some iterations are
done, and for a job of fixed size that has not enough nodes then, at once:

* ``in process``: ``--elastic``, on 2 to 6 nodes;
* ``fixed size``: a job of ``--fixed`` nodes, the others being spares; it waits where fewer are there;
* ``multiples``: expert parallelism of two, on 2 to 6 nodes: all workers are started anew from a checkpoint, on two,
  four or six nodes.

Six workers on two cores are no faster than four: therefore each real micro batch sleeps (``--sleep``), as if a device
computed it, and what a cluster takes counts.  All save every ``--interval`` iterations to disk.  *Samples* are those of
iterations that count, once each; ETTR is their share of what as many nodes as the job has at most would compute in this
time undisturbed.  The simulator's forecast is that of ``tools/simulate.py`` for the same losses, with the job's own
iterations, and with how long the job stood still at changes in the first of the traces: the others are held back.  It
knows other ways as papers have them: all go back to the newest snapshot, also where survivors have the state.
``aws_p3, later`` and ``gcp_a100, later`` are later parts of the same traces.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.ettr.changes import Pauses, pauses
from benchmarks.live.job import KIND, ROOT
from benchmarks.live.members import Nodes
from megatron.pretraining.planning import simulate
from moc.report.members import periods, seconds_by_workers
from moc.simulate.failures import Trace, read_trace

NODES, LEAST, BATCH, GPUS = 6, 2, 24, 8  # GPUs of a node of the simulator
PROGRAM = str(ROOT / "benchmarks/live/device_time.py")
NEAR = 0.03
WARM_UP = 6
"""Iterations before the trace begins."""
TRACES = {
    "aws_p3": ("aws_p3.csv", 0.0, 4800.0, 20.0),
    "gcp_a100": ("gcp_a100.txt", 0.0, 14400.0, 60.0),
    "aws_p3, later": ("aws_p3.csv", 28800.0, 4800.0, 20.0),
    "gcp_a100, later": ("gcp_a100.txt", 28800.0, 14400.0, 60.0),
}
"""By name, the file, the seconds of it at which the replay begins, those that are replayed, and how many times as fast.

Of the later hours, those in which nodes are lost most often.
"""
MODEL = f"""--num-layers 1 --hidden-size 32 --ffn-hidden-size 48 --num-experts 8 --seq-length 16
    --max-position-embeddings 16 --vocab-size 255 --micro-batch-size 1 --global-batch-size {BATCH} --lr 1e-4
    --train-iters 100000 --calculate-per-token-loss --exit-signal-handler --ckpt-policy full --ckpt-tier disk
    --ckpt-keep 2""".split()
WAYS = {  # by name, flags of the program
    "in process": ["--elastic", "--elastic-slots", "6"],
    "fixed size": [],
    "multiples": ["--expert-model-parallel-size", "2"],
}
FORECAST = {"in process": "elastic", "fixed size": "full", "multiples": "full+shrink"}
"""The simulator's policy of each way."""
SHAPE = f"--global-batch-size {GPUS * BATCH} --micro-batch 1"
SHAPES = {"multiples": f"--global-batch-size {BATCH} --micro-batch 2 --ep {2 * GPUS}"}
"""Batches for the simulator's nodes of eight: as many rounds as here, and experts on two nodes where they are here."""
EXPERTS = f"--num-experts {2 * GPUS} --elastic-slots 2"
"""Two for each of eight, so that all have equally much to do."""


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
    iteration_s: float = 0.0  # in the median, with `most` nodes
    most: int = 0  # those with which it has trained the most iterations
    workers_s: dict[int, float] = field(default_factory=dict)  # by number of workers, seconds that they trained
    pauses: Pauses = Pauses()


def changes(trace: Trace, length_s: float, scale: float, begin_s: float = 0.0, most: int = NODES) -> tuple[Change, ...]:
    """The nodes of a trace that are there, scaled to ``most``; the first is at 0.

    Args:
        trace: as recorded.
        length_s: of it that is replayed.
        scale: how many times as fast.
        begin_s: of it at which the replay begins.
        most: nodes where the trace has most in that time.
    """
    alive, counts = trace.nodes, [(0.0, trace.nodes)]
    for event in trace.events:
        if event.at_s <= begin_s + length_s:
            alive += event.gained - event.lost
            counts.append((event.at_s - begin_s, alive))
    before = [count for at_s, count in counts if at_s <= 0]
    counts = [(0.0, before[-1]), *((at_s, count) for at_s, count in counts if at_s > 0)]
    highest = max(count for _, count in counts)
    found: list[Change] = []
    for at_s, count in counts:
        nodes = round(most * count / highest)
        if not found or found[-1].nodes != nodes:
            found.append(Change(at_s / scale, nodes))
    return tuple(found)


def as_trace(of: Sequence[Change], building_s: float = 0.0) -> Iterator[str]:
    """The same in Bamboo's format, node by node, for the simulator, which does not know how long nodes build.

    Args:
        of: the nodes that are there.
        building_s: so much later each is there; one that is lost before is never there.
    """
    there, number, lines = [(0.0, node) for node in range(of[0].nodes)], of[0].nodes, list[tuple[float, str]]()
    lines += [(0.0, f"add,node{node}") for _, node in there]
    for change in of[1:]:
        for _ in range(len(there), change.nodes):
            there.append((change.at_s + building_s, number))
            number += 1
        while len(there) > change.nodes:
            ready_s, node = there.pop()
            lines += [(ready_s, f"add,node{node}"), (change.at_s, f"remove,node{node}")] * (0 < ready_s < change.at_s)
            lines += [(change.at_s, f"remove,node{node}")] * (not ready_s)
    lines += [(ready_s, f"add,node{node}") for ready_s, node in there if ready_s]
    yield from (f"{round(1000 * at_s)},{what}" for at_s, what in sorted(lines, key=lambda line: line[0]))


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
        self._chance, self._told, self._came = random.Random(own.seed), Told(), list[float]()

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
            told.most, told.iteration_s = by_most(events)
        told.fallbacks = [event["reason"] for event in nodes.events.of("fallback")]
        resumed = [event for event in nodes.events.of("resume") if event["time"] > began]
        told.survived = max(0, told.losses - sum(event["tier"] != "live" for event in resumed))
        told.seconds = self._seconds
        of_workers = seconds_by_workers(periods(events, events[0]["time"]))
        told.workers_s = {workers: round(spent, 1) for workers, spent in of_workers.items()}
        told.pauses = pauses(events, self._came, self._own.grow_wait, NODES)
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
            self._came.append(time.time())
            self._told.came += 1

    def _start_what_ended(self, nodes: Nodes) -> None:
        for node, code in nodes.ended().items():
            if code is not None:
                nodes.lose(node)
                nodes.start(node)
                self._told.launchers += 1


def by_most(events: Sequence[dict]) -> tuple[int, float]:
    """The workers with which most iterations were trained, and the median of the seconds of these."""
    workers, taken = 0, dict[int, list[float]]()
    for event in events:
        if event["type"] == "start":
            workers = event["world_size"]
        elif event["type"] == "iteration":
            taken.setdefault(workers, []).append(event["elapsed_s"])
    often = max(taken, key=lambda workers: (len(taken[workers]), workers))
    return often, round(median(taken[often]), 4)


def ettr(own: argparse.Namespace, way: str, told: Told) -> float:
    """The share of what all nodes would have computed undisturbed, by the job's own iterations."""
    return told.samples / BATCH * on_all(own, way, told) / told.seconds


def on_all(own: argparse.Namespace, way: str, told: Told) -> float:
    """Seconds of an iteration on all nodes of the job, by rounds of micro batches if most were trained on fewer."""
    nodes = own.fixed if way == "fixed size" else NODES
    return told.iteration_s * -(-BATCH // nodes) / -(-BATCH // told.most)


def forecast(
    own: argparse.Namespace, of: Sequence[Change], way: str, told: Told, stood: Pauses, files: Path
) -> dict[str, Any]:
    """What the simulator says of the same losses, with the job's iterations.

    Args:
        own: flags of the benchmark.
        of: the nodes that are there.
        way: one of :data:`WAYS`.
        told: what the job has done.
        stood: how long changes take.
        files: a directory for the trace.
    """
    nodes = own.fixed if way == "fixed size" else NODES
    iteration_s, trace = on_all(own, way, told), files / "trace.csv"
    trace.write_text("\n".join([*as_trace(of, stood.building_s), ""]))
    still = f"{max(0.001, stood.still_s):.3f}s"
    flags = f"""--model micro --cluster a100-80gb:{GPUS * nodes} --trace {trace} --trace-nodes --json --runs {own.runs}
        --hours {told.seconds / 3600} --iteration-s {iteration_s:.4f}s --detect 0.001s --restart {still}
        --elastic-regroup {still} --snapshot-overhead 0 --policy {FORECAST[way]} --min-nodes {min(LEAST, nodes)}
        --grow-wait {own.grow_wait}s {SHAPES.get(way, SHAPE)} {EXPERTS}"""
    flags += f" --interval {own.interval}" if way != "in process" else ""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = simulate.main(flags.split())
    if code:
        raise RuntimeError(f"the simulator refuses: {said.getvalue()}")
    (found,) = json.loads(said.getvalue())["policies"].values()
    samples = round(found["ettr"] * told.seconds / iteration_s * BATCH)
    return {"samples": samples} | {name: found[name] for name in ("ettr", "fallbacks", "nodes_s")}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="with the traces' files")
    parser.add_argument("--only", nargs="+", choices=TRACES, metavar="TRACE", help=", ".join(TRACES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, help="of each replay; by default as long as the slice takes")
    parser.add_argument("--scale", type=float, help="how many times as fast; by default 20 and 60")
    parser.add_argument("--fixed", type=int, default=4, help="nodes of the job of fixed size (default: %(default)s)")
    parser.add_argument("--sleep", type=float, default=0.5, help="seconds of a micro batch (default: %(default)s)")
    parser.add_argument("--append", action="store_true", help="keep the traces and ways in --output, but those run now")
    parser.add_argument("--keep", type=Path, help="directory for what the jobs have told")
    parser.add_argument("--interval", type=int, default=5, help="iterations between snapshots (default: %(default)s)")
    parser.add_argument(
        "--grow-wait", type=float, default=2.0, help="seconds, as the launcher's (default: %(default)s)"
    )
    parser.add_argument("--silence", type=float, default=20.0, help="seconds, as the launcher's (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=20, help="of the simulator (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of which nodes are lost")
    return parser.parse_args(arguments)


def replay(own: argparse.Namespace, name: str, way: str, of: Sequence[Change], seconds: float) -> Told:
    """Replays one trace with one way; what it has told is kept where that is asked for."""
    with tempfile.TemporaryDirectory(prefix="spot-replay-") as files, ExitStack() as stack:
        found = Replay(own, way, of, seconds).run(Path(files), stack)
        if own.keep is not None:
            own.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(files) / "log" / "events.jsonl", own.keep / f"{name}, {way}.jsonl")
    print(f"{name}, {way}: {found}", flush=True)
    return found


def main() -> int:
    """Replays the traces with each way, and writes what came of it; 1 if that is not as it should be."""
    own = parse()
    os.environ["DEVICE_TIME_S"] = str(own.sleep)
    told = json.loads(own.output.read_text())["traces"] if own.append and own.output.exists() else {}
    for name in own.only or TRACES:
        file, begin_s, length_s, scale = TRACES[name]
        scale = own.scale or scale
        seconds = own.seconds or length_s / scale
        of = changes(read_trace(own.directory / file), seconds * scale, scale, begin_s)
        beside = told.get(name, {}).get("ways", {})
        told[name] = {"scale": scale, "seconds": seconds, "changes": [asdict(one) for one in of], "ways": beside}
        with ProcessPoolExecutor(len(own.ways)) as pool:  # a job receives signals only in the main thread of a process
            jobs = {way: pool.submit(replay, own, name, way, of, seconds) for way in own.ways}
            try:
                told[name]["ways"] |= {way: asdict(job.result()) for way, job in jobs.items()}
            except BrokenProcessPool:
                sys.exit("spot_replay: a process of a trace was killed, maybe for want of memory: try fewer --ways")
        flags = {flag: getattr(own, flag) for flag in ("sleep", "interval", "fixed", "grow_wait", "silence", "seed")}
        write_json(own.output, {"machine": machine(load=True), "flags": flags, "traces": forecasts(own, told)})
    held = {what: holds for name, of in told.items() for what, holds in claims(name, of["ways"]).items()}
    return int(not say(held))


def forecasts(own: argparse.Namespace, told: dict[str, dict]) -> dict[str, dict]:
    """The traces with ETTR and forecast of each way, by how long changes took in the first trace, which are medians."""
    first = next(iter(told.values()))["ways"]
    building_s = max(one["pauses"]["building_s"] for one in first.values())  # a node builds alike for each way
    for of in told.values():
        for way, figures in of["ways"].items():
            known = Told(**{name: figures[name] for name in ("samples", "seconds", "iteration_s", "most")})
            if not known.most or way not in first:
                continue
            figures["ettr"] = ettr(own, way, known)
            stood = Pauses(first[way]["pauses"]["still_s"], building_s)
            with tempfile.TemporaryDirectory(prefix="spot-replay-") as files:
                changed = [Change(**one) for one in of["changes"]]
                figures["forecast"] = forecast(own, changed, way, known, stood, Path(files))
    return told


def claims(name: str, ways: dict[str, dict]) -> dict[str, bool]:
    """What should hold of the ways of one trace."""
    ours = ways.get("in process")
    if ours is None:
        return {}
    held = {
        f"{name}: in process, {ours['samples']} samples are more than {way}'s {other['samples']}": ours["samples"]
        > other["samples"]
        for way, other in ways.items()
        if way != "in process"
    }
    held[f"{name}: {ours['survived']} of {ours['losses']} losses are survived, the others fell back with a reason"] = (
        ours["survived"] + len(ours["fallbacks"]) >= ours["losses"]
    )
    predicted = ours["forecast"]["ettr"]
    text = f"{name}: ETTR in process is {ours['ettr']:.3f}, and was predicted as {predicted:.3f}, within {NEAR:.0%}"
    held[text] = abs(ours["ettr"] - predicted) <= NEAR
    return held


if __name__ == "__main__":
    sys.exit(main())
