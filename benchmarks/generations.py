"""Checks whether processes accumulate memory, threads or descriptors while one worker is killed many times.

    python benchmarks/generations.py --output docs/results/generations_cpu.json
    python benchmarks/generations.py --kills 50 --deepspeed --output docs/results/generations_deepspeed_cpu.json

A job of two workers (EP2) with a snapshot in memory after each iteration runs under our launcher.  The second worker is
killed 200 times, each time after a new iteration.  After each kill the program samples the first worker, the launcher
(agent), the controller and the forkserver.  It records unique memory (USS), resident memory, threads and descriptors.
At the end the job is asked to stop, and shared memory is searched for leftovers.

The verdict is the slope of a line through the second half of the generations, for each process and figure.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, write_json
from benchmarks.live.job import EP2, IN_MEMORY, MODEL, PATIENCE_S, PROGRAM, SHARED, ZERO2, Job, launcher, look, running
from moc.plots import drawings

WORKERS, VICTIM, SURVIVOR = 2, 1, 0
FIGURES = {"uss_mb": "MB of its own", "rss_mb": "MB resident", "threads": "threads", "descriptors": "descriptors"}
CREEPS = {"uss_mb": 0.05, "rss_mb": 0.05, "threads": 0.01, "descriptors": 0.01}
"""Largest growth per generation: 200 generations then add 10 MB, and 2 threads or descriptors."""


def slopes(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the growth per generation of each figure: least squares through the second half, after warm-up."""
    late = samples[len(samples) // 2 :]
    return {name: float(numpy.polyfit(range(len(late)), [one[name] for one in late], 1)[0]) for name in late[0]}


def creeping(of: dict[str, dict[str, float]]) -> list[str]:
    """Returns the figures of all processes that grow by more than the limit."""
    return [f"{who}: {name}" for who, by in of.items() for name, slope in by.items() if slope > CREEPS[name]]


def measure(kills: int, flags: Sequence[str]) -> dict:
    """Runs the job with these flags, and kills its worker."""
    before = set(os.listdir(SHARED))
    command = [*launcher(WORKERS), PROGRAM, *flags, *IN_MEMORY, "--exit-signal-handler"]
    with tempfile.TemporaryDirectory(prefix="generations-") as files, Job(command, files, saves=True) as job:
        samples = follow(job, kills)
        job.process.terminate()  # requests an orderly end
        code = job.process.wait(PATIENCE_S)
        found = [path for path in job.memory.rglob("*") if path.is_file() and path.stat().st_size > 0]
        left = {"in its memory": [str(path.relative_to(job.memory)) for path in found]}
    left["elsewhere in shared memory"] = sorted(set(os.listdir(SHARED)) - before)
    return {"samples": samples, "exit_code": code, "left": left}


def follow(job: Job, kills: int) -> dict[str, list[dict]]:
    """Kills one worker repeatedly; returns samples by process, the first one from before all kills."""
    job.reach(2)
    survivor = job.workers()[SURVIVOR]
    watched = {"worker": psutil.Process(survivor), "agent": psutil.Process(job.process.pid)}
    watched |= {who: running(job.process.pid, f"moc.runtime.{who}")[0] for who in ("controller", "zygote")}
    samples = {who: [look(process)] for who, process in watched.items()}
    for number in range(1, kills + 1):
        reached, victim = job.iteration, job.workers()[VICTIM]
        os.kill(victim, signal.SIGKILL)
        another = lambda victim=victim: job.workers()[VICTIM] != victim  # noqa: E731
        job.wait_for(another, "another worker")
        job.reach(reached + 2)  # the interrupted iteration and a new one
        if job.workers()[SURVIVOR] != survivor:
            raise RuntimeError(f"the survivor was replaced after kill {number}:\n{job.last_words()}")
        for who, process in watched.items():
            samples[who].append(look(process))
        if number % 10 == 0:
            worker = samples["worker"][-1]
            print(f"{number:4} kills:", "  ".join(f"{k} {v:.0f}" for k, v in worker.items()), flush=True)
    return samples


def draw(samples: dict[str, list[dict]], output: Path) -> None:
    """Draws one panel for each figure, with one line for each process."""
    for figure, panels in drawings(output, 2, 2, figsize=(10, 6.5), sharex=True):
        for panel, (name, text) in zip(panels.flat, FIGURES.items(), strict=True):
            for who, values in samples.items():
                panel.plot([one[name] for one in values], label=who, linewidth=1)
            panel.set_title(text)
            panel.set_ylim(bottom=0)
        for panel in panels[-1]:
            panel.set_xlabel("workers killed")
        figure.suptitle("Resources of a job after each kill of a worker")
        handles = panels[0][0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=4)


def main() -> int:
    """Measures, prints the verdict, writes JSON and a plot; returns 1 on growth or leftovers."""
    parser = command_line(__doc__, "JSON file; the plot is written to the same directory")
    parser.add_argument("--kills", type=int, default=200, help="default: 200")
    parser.add_argument("--deepspeed", action="store_true", help="the DeepSpeed engine, ZeRO-2")
    own = parser.parse_args()
    flags = [*MODEL, *EP2, *(ZERO2 if own.deepspeed else [])]
    told = measure(own.kills, flags)
    told["slopes"] = {who: slopes(values) for who, values in told["samples"].items()}
    told["creeping"] = creeping(told["slopes"])
    for who, by in told["slopes"].items():
        print(f"{who:11}", "  ".join(f"{FIGURES[name]} {slope:+.4f}" for name, slope in by.items()), "a generation")
    bad = told["creeping"] or [place for place, files in told["left"].items() if files]
    print(f"exit code {told['exit_code']}; left in shared memory: {told['left']}")
    print(f"CREEPS OR IS LEFT: {', '.join(bad)}" if bad else "nothing creeps, nothing is left")
    if own.output is not None:
        measured = {"machine": machine(), "flags": flags, "kills": own.kills, "limits": CREEPS}
        write_json(own.output, measured | told)
        draw(told["samples"], own.output.with_suffix(".png"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
