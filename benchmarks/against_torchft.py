"""Compares moc.torch with torchft: the same loop with two workers on CPUs and gloo; one is killed.

    python -m benchmarks.against_torchft --output docs/results/against_torchft_cpu.json

It needs torchft 0.2.0, which no extra has.  Each round runs all loops undisturbed and, except for plain PyTorch, once
more with a SIGKILL of worker 1.  The replacement under torchft is started as soon as the process has ended, which its
users leave to torchrun.

    every 20th     snapshots in memory in every 20th iteration; otherwise, in each
    useful work    from the kill to the next update of any worker, and to the first update of the replacement
    repeated       forward passes of the survivor that led to no update
    weights        all workers end with the weights of the undisturbed run of the same loop
"""

from __future__ import annotations

import difflib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, rotated, show, table, write_json
from benchmarks.live.job import free_ports

LOOPS = Path(__file__).resolve().parent / "torchft_loops"
PROGRAMS = {
    "plain PyTorch": "plain.py",
    "moc.torch": "protected.py",
    "moc.torch, every 20th": "protected.py",
    "torchft, 1 replica continues": "managed.py",
    "torchft, 2 replicas needed": "managed.py",
}
_WARM_UP = 20


@dataclass(frozen=True)
class Sizes:
    """Iterations of a training, width of its hidden layers, and the iteration after which a worker is killed."""

    iterations: int
    width: int
    kill_after: int


class Job:
    """Two workers of a loop, started as their library's users do."""

    def __init__(self, name: str, sizes: Sizes, directory: Path):
        self._name, self._sizes, self.directory = name, sizes, directory
        self._console = open(directory / "console", "w")
        self._processes: dict[Any, subprocess.Popen] = {}
        self._lighthouse: subprocess.Popen | None = None
        self._address = ""
        if name.startswith("torchft"):
            (port,) = free_ports(1)
            self._address = f"http://localhost:{port}"
            program = str(Path(sys.executable).parent / "torchft_lighthouse")
            words = [program, "--min_replicas", "1", "--bind", f"[::]:{port}", "--join_timeout_ms", "10000"]
            self._lighthouse = subprocess.Popen(words, stdout=self._console, stderr=subprocess.STDOUT)
            for rank in (0, 1):
                self._start(rank)
        elif name.startswith("moc.torch"):
            self._processes[None] = self._popen([sys.executable, "-m", "moc.launch", "--nproc-per-node", "2"], {})
        else:
            (port,) = free_ports(1)
            for rank in (0, 1):
                env = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
                self._processes[rank] = self._popen([sys.executable], env)

    def _popen(self, words: list[str], env: Mapping) -> subprocess.Popen:
        sizes = self._sizes
        words = [*words, str(LOOPS / PROGRAMS[self._name]), "--directory", str(self.directory)]
        words += ["--iterations", str(sizes.iterations), "--width", str(sizes.width)]
        if self._name.endswith("needed"):
            words += ["--min-replicas", "2"]
        if self._name.endswith("20th"):
            words += ["--snapshot-interval", "20"]
        full = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | {k: str(v) for k, v in env.items()}
        return subprocess.Popen(words, env=full, stdout=self._console, stderr=subprocess.STDOUT)

    def _start(self, rank: int) -> None:
        env = {"REPLICA_GROUP_ID": rank, "TORCHFT_LIGHTHOUSE": self._address}
        self._processes[rank] = self._popen([sys.executable], env)

    def records(self, rank: int) -> list[dict]:
        """Returns what a worker has written, and its replacement."""
        path = self.directory / str(rank)
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def kill(self) -> float:
        """Kills worker 1, replaces it, and returns the time of the kill."""
        while max((r["iteration"] for r in self.records(1) if r["event"] == "update"), default=0) < (
            self._sizes.kill_after
        ):
            self._check()
            time.sleep(0.002)
        if None in self._processes:
            text = (self.directory / "console").read_text()
            process = int(re.findall(r"worker 1 is process (\d+)", text)[-1])
        else:
            process = self._processes[1].pid
        killed_at = time.monotonic()
        os.kill(process, signal.SIGKILL)
        if None not in self._processes:
            self._processes[1].wait()
            self._start(1)
        return killed_at

    def _check(self) -> None:
        if any(process.poll() not in (None, 0) for process in self._processes.values()):
            raise RuntimeError((self.directory / "console").read_text())

    def end(self) -> list[list[dict]]:
        """Waits for the end, and returns the records of both workers."""
        try:
            for process in self._processes.values():
                process.wait(timeout=240)
            self._check()
        finally:
            self.close()
        return [self.records(rank) for rank in (0, 1)]

    def close(self) -> None:
        """Ends all processes."""
        for process in (*self._processes.values(), self._lighthouse):
            if process is not None:
                process.kill()
                process.wait()
        self._console.close()


def changed_lines(name: str) -> int:
    """Returns the lines of code that differ from plain PyTorch: added, and removed without replacement."""
    plain, other = (_code(LOOPS / PROGRAMS[each]) for each in ("plain PyTorch", name))
    matcher = difflib.SequenceMatcher(None, plain, other, autojunk=False)
    return sum(max(a2 - a1, b2 - b1) for kind, a1, a2, b1, b2 in matcher.get_opcodes() if kind != "equal")


def _code(path: Path) -> list[str]:
    text = re.sub(r'""".*?"""', "", path.read_text(), flags=re.DOTALL)
    wanted = [line.split("  #")[0].rstrip() for line in text.splitlines()]
    return [line for line in wanted if line.strip() and "record" not in line and not line.startswith("sys.path")]


def undisturbed(name: str, sizes: Sizes, directory: Path) -> dict:
    """Returns the seconds of an iteration (median) and the weights."""
    records = Job(name, sizes, directory).end()
    updates = [r["time"] for r in records[0] if r["event"] == "update"][_WARM_UP:]
    seconds = statistics.median(after - before for before, after in zip(updates, updates[1:], strict=False))
    return {"iteration_s": seconds, "weights": [worker[-1]["weights"] for worker in records]}


def disturbed(name: str, sizes: Sizes, directory: Path) -> dict:
    """Kills worker 1, and returns the times to useful work, the repeated iterations and the weights."""
    job = Job(name, sizes, directory)
    try:
        killed_at = job.kill()
    except BaseException:
        job.close()
        raise
    survivor, replaced = job.end()
    of_survivor, of_replacement = (_updates_after(worker, killed_at) for worker in (survivor, replaced))
    events = [r["event"] for r in survivor]
    return {
        "first_update_s": min(of_survivor + of_replacement),
        "all_update_s": min(of_replacement, default=None),
        "repeated": events.count("body") - events.count("update"),
        "weights": [worker[-1].get("weights") for worker in (survivor, replaced)],
    }


def _updates_after(records: list[dict], killed_at: float) -> list[float]:
    """Returns the seconds from the kill to each update of an iteration that began after it."""
    begun, found = 0.0, []
    for record in records:
        begun = record["time"] if record["event"] == "body" else begun
        if record["event"] == "update" and begun > killed_at:
            found.append(record["time"] - killed_at)
    return found


def main() -> int:
    """Measures, prints a table and writes JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=600)
    parser.add_argument("--width", type=int, default=512)
    own = parser.parse_args()
    sizes = Sizes(own.iterations, own.width, own.iterations // 4)
    measured: dict[str, list[dict]] = {name: [] for name in PROGRAMS}
    for number in range(own.rounds):
        for name in rotated(list(PROGRAMS), number):
            with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
                result = {"undisturbed": undisturbed(name, sizes, Path(first))}
                if name != "plain PyTorch":
                    try:
                        result["killed"] = disturbed(name, sizes, Path(second))
                    except RuntimeError as error:  # a worker that was not killed has failed
                        result["killed"] = {"failed": str(error).strip().splitlines()[-1]}
            measured[name].append(result)
            print(f"round {number + 1}, {name}: {json.dumps(result)}", flush=True)
    show(100, [(table("torchft", ["loop", *COLUMNS], rows(measured)), [])])
    lines = {name: changed_lines(name) for name in PROGRAMS}
    write_json(own.output, {"machine": machine(True), "sizes": vars(sizes), "lines": lines, "rounds": measured})
    return 0


COLUMNS = ["lines", "ms/iteration", "ratio", "useful s", "all s", "repeated", "weights"]


def rows(measured: Mapping[str, list[dict]]) -> list[tuple[str, ...]]:
    """Returns the rows of the table: medians over rounds, and the number of rounds with equal weights."""
    result = []
    for name, rounds in measured.items():
        plain = measured["plain PyTorch"]
        times = [one["undisturbed"]["iteration_s"] for one in rounds]
        pairs = zip(times, plain, strict=True)
        ratio = statistics.median(seconds / one["undisturbed"]["iteration_s"] for seconds, one in pairs)
        row = [name, str(changed_lines(name)), f"{1000 * statistics.median(times):.2f}", f"{ratio:.2f}"]
        killed = [one["killed"] for one in rounds if "killed" in one]
        for key, form in (("first_update_s", ".2f"), ("all_update_s", ".2f"), ("repeated", ".0f")):
            values = [one[key] for one in killed if one.get(key) is not None]
            row.append(format(statistics.median(values), form) if values else "")
        equal = sum(_is_equal(one) for one in rounds if "killed" in one)
        result.append((*row, f"{equal} of {len(killed)}" if killed else ""))
    return result


def _is_equal(result: Mapping) -> bool:
    return len({*result["undisturbed"]["weights"], *result["killed"].get("weights", ("failed",))}) == 1


if __name__ == "__main__":
    sys.exit(main())
