"""Replays traces of spot instances with real jobs, and measures training while nodes leave and return.

    python benchmarks/spot_replay.py --directory TRACES --output docs/results/spot_replay_cpu.json
    python benchmarks/spot_replay.py --directory TRACES --only aws_p3 --seconds 60

``TRACES`` has Bamboo's ``aws_p3.csv`` (its first 80 minutes, 20 times as fast) and ``gcp_a100.txt`` (4 hours, 60 times
as fast).  ``aws_p3, later`` and ``gcp_a100, later`` are later parts of the same traces.

The number of nodes follows the trace, scaled to a maximum of six.  Nodes are launchers on this machine with one worker
each; they are killed with all their processes and started again.  The controller runs on none of them.  The trace
begins after some iterations, or immediately for a job of fixed size with too few nodes.  The jobs run concurrently, so
that other load affects all equally, and lose nodes at the same times:

* ``in process``: ``--elastic``, on 2 to 6 nodes;
* ``fixed size``: a job of ``--fixed`` nodes, the others being spares; it waits if fewer nodes are present;
* ``multiples``: expert parallelism of two, on 2 to 6 nodes: all workers are forked again and read a checkpoint, on two,
  four or six nodes.

Six workers on two cores are no faster than four.  Therefore each real micro batch sleeps (``--sleep``), as if a device
computed it.  All jobs save to disk every ``--interval`` iterations.  *Samples* are the samples of counted iterations,
each once.  ETTR is their share of the samples that the job's maximum number of nodes would compute undisturbed.

The forecast is the result of ``tools/simulate.py`` for the same losses.  It uses the job's own iteration time and the
pauses of the first trace; the other traces are held out.  The simulator models the other variants as their
papers do: all workers return to the newest snapshot, even if survivors have the state.
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
from moc.report.figures import seconds_by_workers
from moc.report.run_state import fold_events
from moc.simulate.failures import Trace, read_trace

NODES, LEAST, BATCH, GPUS = 6, 2, 24, 8  # GPUS: of a simulated node
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
"""By name: the file, the replay's start in it in seconds, the replayed seconds, and the speed-up.

The later parts are the hours with most losses of nodes.
"""
MODEL = f"""--num-layers 1 --hidden-size 32 --ffn-hidden-size 48 --num-experts 8 --seq-length 16
    --max-position-embeddings 16 --vocab-size 255 --micro-batch-size 1 --global-batch-size {BATCH} --lr 1e-4
    --train-iters 100000 --calculate-per-token-loss --exit-signal-handler --ckpt-policy full --ckpt-tier disk
    --ckpt-keep 2""".split()
WAYS = {  # name: flags of the program
    "in process": ["--elastic", "--elastic-slots", "6"],
    "fixed size": [],
    "multiples": ["--expert-model-parallel-size", "2"],
}
FORECAST = {"in process": "elastic", "fixed size": "full", "multiples": "full+shrink"}
"""The simulator's policy for each variant."""
SHAPE = f"--global-batch-size {GPUS * BATCH} --micro-batch 1"
SHAPES = {"multiples": f"--global-batch-size {BATCH} --micro-batch 2 --ep {2 * GPUS}"}
"""Batches for the simulator's nodes of eight: as many rounds as here, and experts on as many nodes as here."""
EXPERTS = f"--num-experts {2 * GPUS} --elastic-slots 2"
"""Two slots for each of eight GPUs, so that all have equal work."""


@dataclass(frozen=True)
class Change:
    """Number of nodes from a time on, in seconds since the replay began."""

    at_s: float
    nodes: int


@dataclass
class Told:
    """Result of a job with a trace."""

    samples: int = 0
    seconds: float = 0.0
    losses: int = 0  # lost nodes
    came: int = 0
    survived: int = 0  # losses without a checkpoint read
    fallbacks: list[str] = field(default_factory=list)  # their reasons
    again: int = 0  # repeated iterations
    launchers: int = 0  # restarts of launchers that exited
    iteration_s: float = 0.0  # median, with `most` nodes
    most: int = 0  # number of workers in most iterations
    workers_s: dict[int, float] = field(default_factory=dict)  # training seconds by number of workers
    pauses: Pauses = Pauses()


def changes(trace: Trace, length_s: float, scale: float, begin_s: float = 0.0, most: int = NODES) -> tuple[Change, ...]:
    """Returns the number of nodes over time, scaled to ``most``; the first entry is at 0.

    Args:
        trace: as recorded.
        length_s: replayed seconds of the trace.
        scale: speed-up.
        begin_s: start of the replay in the trace.
        most: nodes at the maximum of the trace in that time.
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
    """Yields the changes in Bamboo's format, node by node, for the simulator, which does not model the start of nodes.

    Args:
        of: number of nodes over time.
        building_s: delay of each start; a node that is lost earlier is omitted.
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
    """One job under the losses of a trace.

    Args:
        own: flags of the benchmark.
        way: one of :data:`WAYS`.
        of: number of nodes over time.
        seconds: duration of the replay.
    """

    def __init__(self, own: argparse.Namespace, way: str, of: Sequence[Change], seconds: float):
        self._own, self._way, self._of, self._seconds = own, way, of, seconds
        self._chance, self._told, self._came = random.Random(own.seed), Told(), list[float]()

    def run(self, files: Path, stack: ExitStack) -> Told:
        """Replays the trace; returns the job's result."""
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
        of_workers = seconds_by_workers(fold_events(events).periods)
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
    """Returns the number of workers of most iterations, and the median seconds of these."""
    workers, taken = 0, dict[int, list[float]]()
    for event in events:
        if event["type"] == "start":
            workers = event["world_size"]
        elif event["type"] == "iteration":
            taken.setdefault(workers, []).append(event["elapsed_s"])
    often = max(taken, key=lambda workers: (len(taken[workers]), workers))
    return often, round(median(taken[often]), 4)


def ettr(own: argparse.Namespace, way: str, told: Told) -> float:
    """Returns the samples as a share of an undisturbed run on all nodes, by the job's own iteration time."""
    return told.samples / BATCH * on_all(own, way, told) / told.seconds


def on_all(own: argparse.Namespace, way: str, told: Told) -> float:
    """Returns seconds of an iteration on all nodes of the job, scaled by rounds if most iterations had fewer nodes."""
    nodes = own.fixed if way == "fixed size" else NODES
    return told.iteration_s * -(-BATCH // nodes) / -(-BATCH // told.most)


def forecast(
    own: argparse.Namespace, of: Sequence[Change], way: str, told: Told, stood: Pauses, files: Path
) -> dict[str, Any]:
    """Returns the simulator's forecast for the same losses, with the job's iteration time.

    Args:
        own: flags of the benchmark.
        of: number of nodes over time.
        way: one of :data:`WAYS`.
        told: result of the job.
        stood: durations of changes.
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
    """Parses the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="with the traces' files")
    parser.add_argument("--only", nargs="+", choices=TRACES, metavar="TRACE", help=", ".join(TRACES))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, help="of each replay; by default the length of the slice")
    parser.add_argument("--scale", type=float, help="how many times as fast; by default 20 and 60")
    parser.add_argument("--fixed", type=int, default=4, help="nodes of the job of fixed size (default: %(default)s)")
    parser.add_argument("--sleep", type=float, default=0.5, help="seconds of a micro batch (default: %(default)s)")
    parser.add_argument("--append", action="store_true", help="keep the traces and ways in --output, but those run now")
    parser.add_argument("--keep", type=Path, help="directory for the jobs' events")
    parser.add_argument("--interval", type=int, default=5, help="iterations between snapshots (default: %(default)s)")
    parser.add_argument(
        "--grow-wait", type=float, default=2.0, help="seconds, as the launcher's (default: %(default)s)"
    )
    parser.add_argument("--silence", type=float, default=20.0, help="seconds, as the launcher's (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=20, help="of the simulator (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of lost nodes")
    return parser.parse_args(arguments)


def replay(own: argparse.Namespace, name: str, way: str, of: Sequence[Change], seconds: float) -> Told:
    """Replays one trace with one variant; keeps the events if requested."""
    with tempfile.TemporaryDirectory(prefix="spot-replay-") as files, ExitStack() as stack:
        found = Replay(own, way, of, seconds).run(Path(files), stack)
        if own.keep is not None:
            own.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(Path(files) / "log" / "events.jsonl", own.keep / f"{name}, {way}.jsonl")
    print(f"{name}, {way}: {found}", flush=True)
    return found


def main() -> int:
    """Replays the traces with each variant, and writes the results; returns 1 if a claim does not hold."""
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
    """Adds ETTR and forecast of each variant to the traces, with the median pauses of the first trace."""
    first = next(iter(told.values()))["ways"]
    building_s = max(one["pauses"]["building_s"] for one in first.values())  # building does not depend on the variant
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
    """Returns the claims about the variants of one trace with whether they hold."""
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
