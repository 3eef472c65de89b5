"""Whether anything creeps: one worker is killed again and again, and those that outlive it all are looked at.

    python benchmarks/generations.py --output docs/results/generations_cpu.json

A job of two workers (EP2) with a snapshot in memory after each iteration runs under our launcher.  The second worker is
killed as soon as an iteration is complete that is new, 200 times.  After each, of the first worker and of the launcher
(the agent), the controller and the process that forks: memory that is theirs alone (USS), resident memory, threads and
descriptors.  In the end the job is asked to stop, and shared memory is looked through for what it has left.

The verdict is the slope of a line through the second half of the generations, for each process and figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy
import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.live.job import MODEL, PROGRAM, Job, launcher

WORKERS, VICTIM, SURVIVOR = 2, 1, 0
LAYOUT = ["--expert-model-parallel-size", "2"]
SHARED = Path("/dev/shm")
FIGURES = {"uss_mb": "MB of its own", "rss_mb": "MB resident", "threads": "threads", "descriptors": "descriptors"}
CREEPS = {"uss_mb": 0.02, "rss_mb": 0.05, "threads": 0.01, "descriptors": 0.01}
"""What a generation may add: 200 generations of these are 4 MB, 10 MB, 2 threads, 2 descriptors."""


def look(process: psutil.Process) -> dict[str, float]:
    """What a process has now."""
    memory = process.memory_full_info()
    counts = {"threads": process.num_threads(), "descriptors": process.num_fds()}
    return {"uss_mb": memory.uss / 2**20, "rss_mb": memory.rss / 2**20, **counts}


def slopes(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """By figure, what a generation adds: least squares through the second half, when all is warm."""
    late = samples[len(samples) // 2 :]
    return {name: float(numpy.polyfit(range(len(late)), [one[name] for one in late], 1)[0]) for name in late[0]}


def creeping(of: dict[str, dict[str, float]]) -> list[str]:
    """What grows by more than it may, of all processes' slopes."""
    return [f"{who}: {name}" for who, by in of.items() for name, slope in by.items() if slope > CREEPS[name]]


def measure(kills: int) -> dict:
    """Runs the job, and kills."""
    before = set(os.listdir(SHARED))
    with tempfile.TemporaryDirectory(prefix="generations-") as name:
        directory, memory = Path(name), SHARED / Path(name).name
        saving = ["--ckpt-policy", "full", "--ckpt-tier", "memory", "--snapshot-interval", 1]
        places = ["--ckpt-dir", directory / "snapshots", "--exit-signal-handler"]
        with Job([*launcher(WORKERS), PROGRAM, *MODEL, *LAYOUT, *saving, *places], directory, memory) as job:
            samples = follow(job, kills)
            code = job.stop()
            files = [path for path in memory.rglob("*") if path.is_file()]
            left = {"in its memory": [str(path.relative_to(memory)) for path in files if path.stat().st_size > 0]}
    left["elsewhere in shared memory"] = sorted(set(os.listdir(SHARED)) - before)
    return {"samples": samples, "exit_code": code, "left": left}


def follow(job: Job, kills: int) -> dict[str, list[dict]]:
    """Kills one worker again and again; by process what it had after each kill, the first entry before all."""
    job.reach(2)
    survivor = job.workers()[SURVIVOR]
    watched = {
        "worker": psutil.Process(survivor),
        "agent": psutil.Process(job.process.pid),
        "controller": job.module("moc.runtime.controller"),
        "zygote": job.module("moc.runtime.zygote"),
    }
    samples = {who: [look(process)] for who, process in watched.items()}
    for number in range(1, kills + 1):
        reached, victim = job.iteration, job.workers()[VICTIM]
        os.kill(victim, signal.SIGKILL)
        another = lambda victim=victim: job.workers()[VICTIM] != victim  # noqa: E731
        job.wait_for(another, "another worker")
        job.reach(reached + 2)  # the one that was being computed, and one that nobody had begun
        if job.workers()[SURVIVOR] != survivor:
            raise RuntimeError(f"the survivor was replaced after kill {number}:\n{job.last_words()}")
        for who, process in watched.items():
            samples[who].append(look(process))
        if number % 10 == 0:
            worker = samples["worker"][-1]
            print(f"{number:4} kills:", "  ".join(f"{k} {v:.0f}" for k, v in worker.items()), flush=True)
    return samples


def draw(samples: dict[str, list[dict]], output: Path) -> None:
    """One panel for each figure, one line for each process."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(10, 6), layout="constrained", sharex=True)
    for panel, (name, text) in zip(panels.flat, FIGURES.items(), strict=True):
        for who, values in samples.items():
            panel.plot([one[name] for one in values], label=who, linewidth=1)
        panel.set_title(text)
        panel.set_ylim(bottom=0)
    for panel in panels[-1]:
        panel.set_xlabel("workers killed")
    panels[0][0].legend()
    figure.savefig(output, dpi=120)


def main() -> int:
    """Measures, prints the verdict, writes JSON and a plot; 1 if something creeps or is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="default: 200")
    parser.add_argument("--output", type=Path, help="JSON file; the plot goes beside it")
    own = parser.parse_args()
    told = measure(own.kills)
    told["slopes"] = {who: slopes(values) for who, values in told["samples"].items()}
    told["creeping"] = creeping(told["slopes"])
    for who, by in told["slopes"].items():
        print(f"{who:11}", "  ".join(f"{FIGURES[name]} {slope:+.4f}" for name, slope in by.items()), "a generation")
    bad = told["creeping"] or [place for place, files in told["left"].items() if files]
    print(f"exit code {told['exit_code']}; left in shared memory: {told['left']}")
    print(f"CREEPS OR IS LEFT: {', '.join(bad)}" if bad else "nothing creeps, nothing is left")
    if own.output is not None:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
        told = {"machine": machine, "flags": [*MODEL, *LAYOUT], "kills": own.kills, "limits": CREEPS} | told
        own.output.write_text(json.dumps(told, indent=1) + "\n")
        draw(told["samples"], own.output.with_suffix(".png"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
