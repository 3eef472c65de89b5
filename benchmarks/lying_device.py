"""Kills workers at random on a simulated unreliable device, and checks for bit-identical results.

    python benchmarks/lying_device.py --aborts 500 --output docs/results/lying_device_cpu.json

Each run trains ``examples/pure_torch.py`` under our launcher, with process groups that behave like NCCL's
(``tests/lying``): operations pending when a generation ends or a peer is lost complete with garbage, without an error.
One or two workers are killed at a time, at random moments of training and sometimes of a recovery.  With ``--breaks``
an abort sometimes breaks the device, or fails.

The program counts aborts (one for each worker that ends a generation) and aborts with pending operations.  It also
counts runs with other final weights, hangs, and unresponsive workers that the launcher had to kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, write_json
from benchmarks.live.job import ROOT, WORKER

PROGRAM = ROOT / "tests/integration/lying_pure_torch.py"
END = re.compile(r"^(iteration \d+: loss .*, weights [0-9a-f]{16})$", re.MULTILINE)
GENERATION = re.compile(r"^mocrun: generation (\d+): (.*)$", re.MULTILINE)
DEAF = re.compile(r"it sent no heartbeat|it was in its|has been in its")


@dataclass(frozen=True)
class Row:
    """Outcome of one run."""

    workers: int
    seed: int
    breaks: float
    kills: int
    generations: int
    aborts: int  # of one worker's groups each, without those at the end of the run
    under_way: int  # aborts with pending operations
    broken: int  # workers that exited because their device was broken
    deaf: int
    seconds: float
    wrong: str = ""  # failure; empty if the run passed


class Run:
    """One job in its own directory."""

    def __init__(self, own: argparse.Namespace, workers: int, seed: int, directory: Path):
        self._own, self._workers, self._seed, self._directory = own, workers, seed, directory
        self._chance, self._told = random.Random(seed), 0
        self._memory = Path(tempfile.mkdtemp(prefix="moc-lying-", dir="/dev/shm"))
        directory.mkdir(parents=True)

    def to_its_end(self, kills: int) -> tuple[Row, str]:
        """Runs the job with at most this many kills; returns its row and its last line."""
        begun, killed = time.monotonic(), 0
        process = self._start()
        try:
            while process.poll() is None and time.monotonic() - begun < self._own.limit:
                time.sleep(0.01 if killed < kills else 0.2)
                if killed < kills and self._may_kill():
                    time.sleep(self._chance.expovariate(1 / self._own.gap))
                    killed += self._kill()
            hangs = process.poll() is None
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(self._memory, ignore_errors=True)
        told, ends = self._console, END.findall(self._console)
        reasons = [reason for _, reason in GENERATION.findall(told)]
        aborts = [int(line.split()[1]) for line in self._lines("aborts")][: -self._workers or None]
        wrong = f"no end after {self._own.limit:g} s" if hangs else f"exit code {process.returncode}"
        row = Row(
            workers=self._workers,
            seed=self._seed,
            breaks=self._own.breaks if kills else 0.0,
            kills=killed,
            generations=len(reasons),
            aborts=len(aborts),
            under_way=sum(number > 0 for number in aborts),
            broken=told.count("it ends itself, to be replaced"),
            deaf=sum(bool(DEAF.search(reason)) for reason in reasons),
            seconds=round(time.monotonic() - begun, 1),
            wrong="" if not hangs and process.returncode == 0 and ends else wrong,
        )
        return row, ends[-1] if ends else ""

    def _start(self) -> subprocess.Popen:
        lies = {"seed": self._seed, "breaks": self._own.breaks}
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
            "LYING_DEVICE": json.dumps(lies),
            "LYING_LOG": str(self._directory / "aborts"),
            "LYING_MEMORY": str(self._memory),
        }
        launcher = ["-W", "ignore", "-m", "moc.launch", "--nproc-per-node", str(self._workers)]
        launcher += ["--max-standstill", "1000"]  # faults may strike at one iteration again and again
        own = ["--ckpt-dir", str(self._directory / "snapshots"), "--iterations", str(self._own.iterations)]
        own += ["--log-dir", str(self._directory / "log")]
        with open(self._directory / "console", "w") as console:
            return subprocess.Popen(
                [sys.executable, *launcher, str(PROGRAM), *own],
                env=environment,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def _console(self) -> str:
        return (self._directory / "console").read_text()

    def _lines(self, name: str) -> list[str]:
        path = self._directory / name
        return path.read_text().splitlines() if path.exists() else []

    def _may_kill(self) -> bool:
        """Whether the job has progressed since the last kill; sometimes True without it, once training has begun."""
        told = len(self._lines("log/events.jsonl"))
        goes_on = told > self._told + 3
        self._told = told if goes_on else self._told
        return goes_on or (told > 3 and self._chance.random() < 0.0003)

    def _kill(self) -> int:
        pids = {int(rank): int(pid) for rank, pid in WORKER.findall(self._console)}
        ranks = self._chance.sample(sorted(pids), min(len(pids) - 1, self._chance.choice((1, 1, 1, 2))))
        killed = 0
        for rank in ranks:
            try:
                os.kill(pids[rank], 9)
                killed += 1
            except ProcessLookupError:
                pass
        return killed


def rows(own: argparse.Namespace, directory: Path) -> Iterator[Row]:
    """Yields the outcome of each run, until there were enough aborts."""
    expected: dict[int, str] = {}
    aborts, number = 0, 0
    while aborts < own.aborts:
        workers = own.workers[number % len(own.workers)]
        if workers not in expected:
            row, expected[workers] = Run(own, workers, 0, directory / f"undisturbed_{workers}").to_its_end(0)
            if row.wrong:
                raise RuntimeError(f"the run without kills failed ({row.wrong}): see {directory}")
        seed = own.seed * 1000 + number
        row, end = Run(own, workers, seed, directory / f"run_{number:03d}").to_its_end(own.kills)
        if not row.wrong and end != expected[workers]:
            row = replace(row, wrong=f"{end}, and not {expected[workers]}")
        if not row.wrong:
            shutil.rmtree(directory / f"run_{number:03d}")
        aborts, number = aborts + row.aborts, number + 1
        yield row


def summary(told: list[Row]) -> dict:
    """Summarizes all runs."""
    counted = ("kills", "generations", "aborts", "under_way", "broken", "deaf")
    sums = {name: sum(getattr(row, name) for row in told) for name in counted}
    hangs = sum(row.wrong.startswith("no end") for row in told)
    return {"runs": len(told), "wrong": sum(bool(row.wrong) for row in told), "hangs": hangs} | sums


def main() -> int:
    """Runs until there were enough aborts; returns 1 if a run failed or a worker was unresponsive."""
    parser = command_line(__doc__)
    parser.add_argument("--aborts", type=int, default=500, help="at least so many (default: 500)")
    parser.add_argument("--workers", type=int, nargs="+", default=[3, 2], help="of each run, in turns (default: 3 2)")
    parser.add_argument("--iterations", type=int, default=400, help="of each run (default: 400)")
    parser.add_argument("--kills", type=int, default=60, help="in each run, at most (default: 60)")
    parser.add_argument(
        "--gap", type=float, default=0.1, help="mean seconds from one recovery to the next kill (default: 0.1)"
    )
    parser.add_argument("--breaks", type=float, default=0.0, help="chance that an abort breaks the device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--append", action="store_true", help="keep the runs that the file of --output has")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a run hangs (default: 300)")
    own = parser.parse_args()
    earlier = json.loads(own.output.read_text())["runs"] if own.append and own.output.exists() else []
    told = [Row(**run) for run in earlier]
    directory = Path(tempfile.mkdtemp(prefix="lying-device-"))
    for row in rows(own, directory):
        told.append(row)
        what = row.wrong or "EQUAL"
        print(
            f"{row.workers} workers {row.kills:3} kills {row.aborts:4} aborts {row.seconds:6.1f} s  {what}", flush=True
        )
        if own.output:
            flags = {name: value for name, value in vars(own).items() if name != "output"}
            result = {"machine": machine(), "flags": flags, "summary": summary(told), "runs": [*map(asdict, told)]}
            write_json(own.output, result)
    print(json.dumps(summary(told), indent=1))
    if any(row.wrong or row.deaf for row in told[len(earlier) :]):
        print(f"files of the failed runs: {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
