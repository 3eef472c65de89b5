"""Random faults in small jobs, and whether the runs end as if nothing had been.

    python benchmarks/random_faults.py --faults 200 --output docs/results/random_faults_cpu.json

Each run trains a tiny model under our launcher, in one layout and with one tier of snapshots, the next run in the
next.  One to three workers at once are killed at random points of step, snapshot, persistence and recovery
(``--inject-mtbf-iterations``), one of them is stopped (SIGSTOP) somewhere in a step, one is slow, and the controller
is killed.  With ``peers`` a job has two nodes, each with a launcher and memory of its own; the second one is lost as a
whole, memory and all, and comes back.

At the end the run must equal that of its layout without faults: losses and gradient norms of all iterations, and the
hash of every tensor of the last snapshot.  A run that does not end, and one that leaves processes, memory or temporary
files behind, has failed too; all files of a run that failed are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from moc.faults import STEP  # noqa: E402
from moc.runtime.inject import Fault  # noqa: E402
from moc.store.places import LocalPlace  # noqa: E402
from moc.store.regions import RegionReader  # noqa: E402
from moc.store.store import Store, directory_of  # noqa: E402

MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --num-experts 8
    --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall --seq-length 32
    --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --mock-data
    --tokenizer-type NullTokenizer --vocab-size 255 --transformer-impl local --micro-batch-size 1
    --global-batch-size 8 --lr 1e-3 --eval-iters 0 --num-workers 0 --log-interval 1 --ckpt-policy full""".split()
ZERO, PP2, EP2 = "--use-distributed-optimizer", "--pipeline-model-parallel-size 2", "--expert-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
LAYOUTS = {  # name: (workers, flags)
    "DP4xEP2": (4, f"{ZERO} {EP2}"),
    "PP2xEP2": (4, f"{ZERO} {PP2} {EP2}"),
    "PP2xDP2": (4, f"{ZERO} {PP2}"),
    "TP2xEP2": (4, f"{ZERO} {TP2} {EP2}"),
    "DP4, replicated": (4, ""),
    "PP2, interleaved": (2, f"{ZERO} {PP2} --num-virtual-stages-per-pipeline-rank 2"),
}
TIERS = {
    "memory": "--ckpt-tier memory --snapshot-interval 1 --persist-interval 4",
    "disk": "--ckpt-tier disk --snapshot-interval 2",
    "peers": "--ckpt-tier peers --snapshot-interval 1 --persist-interval 4",
}
SLOW_S = 1.0
ONE_NODE = ("DP4, replicated",)
"""Layouts in which several nodes would hold the same state, which memory tiers refuse."""


@dataclass
class Row:
    """What became of one run.

    Attributes:
        fired: each fault that happened.
        generations: memberships that began after the first one.
        wrong: what is not as it should be; empty if all is.
        seconds: from start to end.
    """

    layout: str
    tier: str
    seed: int
    fired: list[str] = field(default_factory=list)
    generations: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class End:
    """How a run ended: by iteration its losses and norms, by tensor and region the hash in the last snapshot."""

    losses: dict
    hashes: dict


class Run:
    """One job, in a directory of its own.

    Args:
        own: flags of this benchmark.
        layout: one of :data:`LAYOUTS`.
        tier: one of :data:`TIERS`.
        directory: for its files; made.
        faults: flags that name them.
    """

    def __init__(self, own: argparse.Namespace, layout: str, tier: str, directory: Path, faults: list[str]):
        self.directory, self._own, self.wrong = directory, own, []
        self._memory = Path(tempfile.mkdtemp(prefix="random-faults-", dir="/dev/shm"))
        directory.mkdir(parents=True)
        size, parallel = LAYOUTS[layout]
        places = ["--ckpt-dir", directory / "snapshots", "--ckpt-memory-dir", self._memory, "--log-dir", directory]
        self._nodes = 2 if tier == "peers" else 1
        launcher = ["-m", "moc.launch", "--nproc-per-node", size // self._nodes, "--silence-timeout", own.silence]
        if self._nodes > 1:
            launcher += ["--nnodes", self._nodes, "--rdzv-endpoint", f"127.0.0.1:{_free_port()}"]
        program = [ROOT / "pretrain_gpt_moe.py", *MODEL, "--train-iters", own.iterations]
        self._launcher = [sys.executable, "-W", "ignore", *map(str, launcher)]
        self._program = list(map(str, [*program, *parallel.split(), *TIERS[tier].split(), *places, *faults]))
        self._token = secrets.token_hex(32)

    def to_its_end(self, lose_node_at: int | None = None, lose_controller_at: int | None = None) -> float:
        """Runs it, and notes in ``wrong`` what it should not have done; seconds.

        Args:
            lose_node_at: iteration after which the second node is lost; None for not at all.
            lose_controller_at: the same for the controller.
        """
        begun = time.monotonic()
        launchers = [self._start(node) for node in range(self._nodes)]
        while launchers[0].poll() is None and time.monotonic() - begun < self._own.limit:
            time.sleep(0.02)
            if lose_node_at is not None and self._iteration() >= lose_node_at:
                self._lose(launchers[1])
                launchers[1], lose_node_at = self._start(1), None
            if lose_controller_at is not None and self._iteration() >= lose_controller_at:
                lose_controller_at = None if _kill_controller(launchers[0]) else lose_controller_at
        if launchers[0].poll() is None:
            self.wrong.append(f"no end after {self._own.limit:g} s")
        elif launchers[0].returncode:
            self.wrong.append(f"exit code {launchers[0].returncode}")
        seconds = time.monotonic() - begun
        for launcher in launchers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(5 if launchers[0].poll() is not None else 0)
            launcher.kill()
            launcher.wait()
        self._look_for_leftovers()
        return seconds

    def _start(self, node: int) -> subprocess.Popen:
        ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "MOC_TOKEN": self._token}
        self._temporary(node).mkdir(exist_ok=True)
        with open(self.directory / "console", "a") as console:
            return subprocess.Popen(
                [*self._launcher, "--node-rank", str(node), *self._program],
                env=os.environ | ours | {"TMPDIR": str(self._temporary(node))},
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def _iteration(self) -> int:
        return max((event["iteration"] for event in self.events("iteration")), default=0)

    def _lose(self, launcher: subprocess.Popen) -> None:
        """A machine is gone: all of its processes at once, what was in its memory, and what it had in /tmp."""
        processes = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        launcher.wait()
        psutil.wait_procs(processes, timeout=30)
        for path in [*self._memory.glob("*/*-node-1"), self._temporary(1)]:
            shutil.rmtree(path)

    def _temporary(self, node: int) -> Path:
        return self.directory / f"tmp{node}"

    def end(self) -> End:
        """What it has come to."""
        lines = {event["iteration"]: (event["loss"], event["grad_norm"]) for event in self.events("iteration")}
        store = Store(LocalPlace(self.directory / "snapshots"))
        if store.iterations()[-1:] != [self._own.iterations]:
            return End(lines, {})
        names = store.manifest(self._own.iterations).files
        reader = RegionReader(store.place.blob(f"{directory_of(self._own.iterations)}/{name}") for name in names)
        hashes = {(one.entry.name, one.entry.slot, one.entry.region): one.digest for one in reader.sources()}
        return End(lines, hashes)

    def events(self, kind: str) -> list[dict]:
        """The events of a kind."""
        path = self.directory / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(_loads, lines) if event.get("type") == kind]

    def _look_for_leftovers(self) -> None:
        time.sleep(0.5)  # the kernel takes a moment to end what has lost its parent
        mine = [p for p in psutil.process_iter(["cmdline"]) if str(self.directory) in " ".join(p.info["cmdline"] or ())]
        self.wrong += [f"process {process.pid} is left" for process in mine]
        for process in mine:
            process.kill()
        memory = [path for path in self._memory.rglob("*") if path.is_file() and path.stat().st_size]
        self.wrong += [f"{path} is left" for path in [*memory, *self.directory.glob("tmp*/mocrun-*")]]
        shutil.rmtree(self._memory)


class Campaign:
    """Runs one after the other, until enough faults have happened.

    Args:
        own: flags of this benchmark.
        directory: for the files of all runs.
    """

    def __init__(self, own: argparse.Namespace, directory: Path):
        self._own, self._directory = own, directory
        self._undisturbed: dict[str, End] = {}

    def rows(self):
        """Gives what became of each run."""
        fired = 0
        cases = itertools.product(self._own.tiers, self._own.layouts)
        cases = [(tier, layout) for tier, layout in cases if tier != "peers" or layout not in ONE_NODE]
        for number, (tier, layout) in enumerate(itertools.cycle(cases)):
            if fired >= self._own.faults:
                return
            row = self._row(layout, tier, self._own.seed * 1000 + number, self._directory / f"run_{number:03d}")
            fired += len(row.fired)
            yield row

    def _row(self, layout: str, tier: str, seed: int, directory: Path) -> Row:
        expected = self._without_faults(layout)
        faults = ["--inject-mtbf-iterations", self._own.mtbf, "--inject-seed", seed]
        chance = random.Random(seed)
        stop, slow = (_somewhere(kind, chance, LAYOUTS[layout][0], self._own.iterations) for kind in ("stop", "slow"))
        run = Run(self._own, layout, tier, directory, [*faults, "--inject", stop, slow])
        chance, last = random.Random(seed), self._own.iterations - 5
        lose_node_at = chance.randint(2, last) if tier == "peers" else None
        lose_controller_at = chance.randint(2, last)
        seconds = run.to_its_end(lose_node_at, lose_controller_at)
        ended = run.end()
        fired = ["{action} {rank} at {iteration}, {point}".format(**event) for event in run.events("inject")]
        fired += [] if lose_node_at is None else [f"lose node 1 at {lose_node_at}, any"]
        fired += [f"lose controller at {lose_controller_at}, any"]
        wrong = run.wrong + _differences(ended, expected)
        if not wrong:
            shutil.rmtree(directory)
        return Row(layout, tier, seed, fired, len(run.events("generation")), wrong, round(seconds, 1))

    def _without_faults(self, layout: str) -> End:
        if layout not in self._undisturbed:
            directory = self._directory / f"undisturbed_{len(self._undisturbed)}"
            run = Run(self._own, layout, "disk", directory, [])
            run.to_its_end()
            ended = run.end()
            if run.wrong or len(ended.losses) < self._own.iterations or not ended.hashes:
                raise RuntimeError(f"the run of {layout} without faults failed: see {directory}/console")
            self._undisturbed[layout] = ended
            shutil.rmtree(directory)
        return self._undisturbed[layout]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _kill_controller(launcher: subprocess.Popen) -> bool:
    """Whether there was one to kill."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher.pid).children():
            if "moc.runtime.controller" in child.cmdline():
                child.kill()
                return True
    return False


def _somewhere(action: str, chance: random.Random, size: int, iterations: int) -> Fault:
    at, rank, point = chance.randint(2, iterations), chance.randrange(size), chance.choice(list(STEP))
    return Fault(action, at, (rank,), point=point, seconds=SLOW_S if action == "slow" else 0.0)


def _differences(ended: End, expected: End) -> list[str]:
    wrong = []
    if ended.losses != expected.losses:
        differ = sorted(i for i, values in expected.losses.items() if ended.losses.get(i) != values)
        wrong.append(f"losses differ in iterations {differ[:5]}")
    if ended.hashes != expected.hashes:
        boxes = ended.hashes.keys() | expected.hashes.keys()
        differ = sum(ended.hashes.get(box) != expected.hashes.get(box) for box in boxes)
        wrong.append(f"{differ} of {len(boxes)} tensors differ")
    return wrong


def _loads(line: str) -> dict:
    try:
        return json.loads(line)
    except json.JSONDecodeError:  # the line that a killed worker was writing
        return {}


def summary(rows: list[Row]) -> dict:
    """What all runs come to together."""
    fired = [fault for row in rows for fault in row.fired]
    return {
        "runs": len(rows),
        "equal": sum(not row.wrong for row in rows),
        "faults": len(fired),
        "by_point": dict(Counter(fault.rpartition(" ")[2] for fault in fired).most_common()),
        "by_action": dict(Counter(fault.partition(" ")[0] for fault in fired)),
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="runs follow each other until so many have happened")
    parser.add_argument("--layouts", nargs="+", choices=["all", *LAYOUTS], default=["all"], metavar="LAYOUT")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS), metavar="TIER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=40, help="of each run")
    parser.add_argument("--mtbf", type=float, default=8.0, help="iterations from one random fault to the next")
    parser.add_argument("--silence", type=float, default=5.0, help="seconds after which a stopped worker is lost")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds after which a run hangs")
    parser.add_argument("--directory", type=Path, help="for the files of runs; by default a temporary one")
    parser.add_argument("--output", type=Path, help="JSON file")
    own = parser.parse_args(arguments)
    own.layouts = list(LAYOUTS) if "all" in own.layouts else own.layouts
    return own


def main() -> int:
    """Runs the campaign; 1 if a run failed."""
    own, rows = parse(), []
    directory = own.directory or Path(tempfile.mkdtemp(prefix="random-faults-"))
    for row in Campaign(own, directory).rows():
        rows.append(row)
        what = "EQUAL" if not row.wrong else f"FAILED: {'; '.join(row.wrong)} (see {directory}/run_{len(rows) - 1:03d})"
        print(f"{row.layout:17} {row.tier:7} {len(row.fired):3} faults {row.seconds:6.1f} s  {what}", flush=True)
        if own.output is not None:
            machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
            flags = {name: value for name, value in vars(own).items() if name not in ("output", "directory")}
            told = {"machine": machine, "flags": flags, "summary": summary(rows), "runs": [asdict(r) for r in rows]}
            own.output.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))
    if all(not row.wrong for row in rows):
        shutil.rmtree(directory)
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
