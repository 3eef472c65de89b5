"""How long a job stands still when a worker is killed: under our launcher, and when torchrun starts all of them again.

    python benchmarks/recovery_time.py --output docs/results/recovery_time_cpu.json

Each way runs ``pretrain_gpt_moe.py`` with 4 workers (PP2 x EP2), takes a snapshot in every iteration, and gets one of
its workers killed by SIGKILL now and again while it trains.  Counted is the time from the kill until the iteration is
complete that was being computed, less the time of an iteration (median of those before the kill): seconds outside
useful work, iterations that are computed again included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 4
MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96 --num-experts 8
    --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall
    --seq-length 64 --max-position-embeddings 64
    --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --mock-data
    --tokenizer-type NullTokenizer --vocab-size 255 --transformer-impl local --use-distributed-optimizer
    --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 100000 --eval-iters 0 --num-workers 0
    --pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --ckpt-policy full --snapshot-interval 1""".split()
OURS = ["-m", "moc.launch", "--nproc-per-node", str(WORKERS)]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", "10000"]
CASES = {  # name: (launcher, tier)
    "ours, memory": (OURS, "memory"),
    "ours, disk": (OURS, "disk"),
    "torchrun, memory": (TORCHRUN, "memory"),
    "torchrun, disk": (TORCHRUN, "disk"),
}
SETTLE = 5  # iterations before the next kill
PATIENCE_S = 120.0


class Job:
    """A job that is being trained, as a context manager.

    Args:
        name: of the case.
        directory: for its files.
    """

    def __init__(self, name: str, directory: Path):
        launcher, tier = CASES[name]
        self._events, memory = directory / "log" / "events.jsonl", Path("/dev/shm") / directory.name
        self._memory, self._is_ours = memory, launcher is OURS
        memory.mkdir()
        places = ["--ckpt-dir", directory / "snapshots", "--ckpt-memory-dir", memory, "--log-dir", directory / "log"]
        command = [sys.executable, "-W", "ignore", *launcher, ROOT / "pretrain_gpt_moe.py", *MODEL, "--ckpt-tier", tier]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with open(directory / "console", "w") as console:
            self._process = subprocess.Popen(
                [str(word) for word in [*command, *places]],
                env=environment,
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_) -> None:
        mine = [self._process.pid, *(child.pid for child in psutil.Process(self._process.pid).children(recursive=True))]
        for pid in mine:
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._memory)

    def events(self, kind: str) -> list[dict]:
        """The events of a kind so far."""
        lines = self._events.read_text().splitlines() if self._events.exists() else []
        return [event for event in map(_loads, lines) if event.get("type") == kind]

    def wait_for(self, ready, what: str):
        """What ``ready`` returns, as soon as that is something."""
        deadline = time.time() + PATIENCE_S
        while not (answer := ready()):
            if time.time() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"{what} did not come; see the job's console")
            time.sleep(0.002)
        return answer

    def workers(self) -> list[int]:
        """Processes of the workers."""
        children = psutil.Process(self._process.pid).children()
        if self._is_ours:
            zygote = next(child for child in children if "moc.runtime.zygote" in child.cmdline())
            children = zygote.children()
        return [child.pid for child in children]

    def recover(self, chance: random.Random) -> dict[str, float]:
        """Kills a worker somewhere in an iteration; seconds of what follows."""
        done = self.events("iteration")[-1]["iteration"]
        self.wait_for(lambda: self.events("iteration")[-1]["iteration"] >= done + SETTLE, "an iteration")
        usual = median(event["elapsed_s"] for event in self.events("iteration")[-SETTLE:])
        time.sleep(chance.uniform(0, usual))
        reached, killed = self.events("iteration")[-1]["iteration"], time.time()
        os.kill(chance.choice(self.workers()), signal.SIGKILL)
        first = self.wait_for(lambda: [e for e in self._since(killed, "iteration")], "the first iteration")[0]
        again = self.wait_for(
            lambda: [e for e in self._since(killed, "iteration") if e["iteration"] > reached], "a new iteration"
        )[0]
        if first["iteration"] == reached + 1 and not self._since(killed, "resume"):  # it was complete already
            return self.recover(chance)
        loaded = self._since(killed, "resume")[0]
        return {
            "loaded": loaded["time"] - killed,
            "first iteration": first["time"] - killed,
            "outside useful work": again["time"] - killed - usual,
            "iterations again": reached - loaded["iteration"],
        }

    def _since(self, moment: float, kind: str) -> list[dict]:
        return [event for event in self.events(kind) if event["time"] >= moment]


def measure(name: str, kills: int, seed: int) -> list[dict[str, float]]:
    """Kills workers of a job, one after the other."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory, Job(name, Path(directory)) as job:
        job.wait_for(lambda: job.events("iteration"), "the first iteration")
        return [job.recover(chance) for _ in range(kills)]


def _loads(line: str) -> dict:
    try:
        return json.loads(line)
    except json.JSONDecodeError:  # the line that a killed worker was writing
        return {}


def main() -> None:
    """Runs all cases, and writes what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--output", type=Path, help="JSON file")
    own = parser.parse_args()
    results = {}
    for name in own.cases:
        results[name] = measure(name, own.kills, own.seed)
        medians = {what: median(sample[what] for sample in results[name]) for what in results[name][0]}
        print(f"{name:18}", "  ".join(f"{what} {value:.2f}" for what, value in medians.items()), flush=True)
    if own.output is not None:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
        own.output.write_text(json.dumps({"machine": machine, "flags": MODEL, "samples": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
