"""Compares the public implementation of MoEvement with ours: same model, same machine, same faults.

    python benchmarks/public_moevement.py --peer CHECKOUT --peer-python PYTHON \\
        --output docs/results/public_moevement_cpu.json

CHECKOUT is the repository Swapnil-Gandhi/MoEvement, a fork of DeepSpeed.  PYTHON is an interpreter with torch and
DeepSpeed's dependencies (``pip install torch deepspeed``; the checkout precedes the installed package).  The checkout
is not changed: ``peer_moevement/worker.py`` patches it from outside to run without a GPU.

Both train a GPT-MoE of the same sizes (``peer_moevement/cases.py``) in 4 workers, 2 stages of 2 data-parallel ranks,
ZeRO-1, with different samples in each iteration.  The comparison covers

* the time of an iteration without snapshots, and with windows of 1 and of 3; all jobs are alive and take turns of
  a few seconds (``benchmarks/live/slices.py``);
* the bytes of snapshots;
* SIGKILL of a worker, and the time until the end of the first new iteration;
* the final state with and without the fault: the number of parameters with identical masters and moments.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, write_json
from benchmarks.live.job import Job
from benchmarks.live.slices import pause, resume, slices, warm_up
from benchmarks.peer_moevement import figures
from benchmarks.peer_moevement.cases import SAVING, SHAPE, WORKERS, Case, Plan, our_flags, start

SYSTEMS = ("ours", "public")
WINDOWS = (0, 1, 3)
VICTIMS = {1: (1,), 3: (1, 3)}
"""Workers that are killed, by window: 1 is in the first stage, 3 in the last."""
OUTCOMES = {
    "public as it is, killed between iterations": Case("public", 3, victim=1, repaired=False),
    "public, killed in the middle of an iteration": Case("public", 3, victim=1, anywhere=True),
}
CASES = [Case(system, window) for window in WINDOWS for system in SYSTEMS]
ENDLESS = 100_000
SETTLED = 8
ENOUGH = 8  # rounds that suffice if a job exits early
GIVE_UP_S = 30.0
END_S = 240.0


def run(case: Case, plan: Plan, chance: random.Random) -> tuple[list[dict], figures.State | None, dict | None]:
    """Returns a job's events, its final state (None for ours without snapshots), and the recovery's figures."""
    with tempfile.TemporaryDirectory(prefix="public-moevement-") as name:
        directory = Path(name)
        with start(case, plan, directory) as job:
            killed = None if case.victim is None else kill(job, case, plan, chance)
            followed = None
            if killed is not None:
                followed = job.wait_for(lambda: figures.recovery(job.events.all(), killed), "a new iteration")
            try:
                code = job.process.wait(END_S)
            except subprocess.TimeoutExpired:
                code = f"none after {END_S:g} s"
            if code:
                raise RuntimeError(f"{case.name}: exit code {code}; its last words:\n{job.last_words()}")
            events = list(job.events.all())
        if case.system == "public":
            return events, figures.public_end(directory / "end"), followed
        return events, figures.our_end(directory / "snapshots", plan.iterations) if case.window else None, followed


def kill(job: Job, case: Case, plan: Plan, chance: random.Random) -> float:
    """Kills the victim by SIGKILL; returns the time."""
    job.reach(plan.kill_at)
    usual = median(figures.iteration_seconds(job.events.all(), warm_up=plan.kill_at // 2))
    if case.system == "public" and not case.anywhere:
        job.wait_for(lambda: len(job.events.of("ready")) == WORKERS, "the public workers' readiness")
    time.sleep(chance.uniform(0, usual))
    told = {event["rank"]: event["pid"] for event in job.events.of("worker")}  # reported by public workers
    pids, killed = told or job.workers(), time.time()
    assert case.victim is not None  # the callers pass a victim
    os.kill(pids[case.victim], signal.SIGKILL)
    return killed


def outcome(case: Case, plan: Plan, chance: random.Random) -> str:
    """Describes what happens after the kill, for jobs that may fail."""
    with (
        tempfile.TemporaryDirectory(prefix="public-moevement-") as directory,
        start(case, plan, Path(directory)) as job,
    ):
        killed = kill(job, case, plan, chance)
        while time.time() - killed < GIVE_UP_S:
            if followed := figures.recovery(job.events.all(), killed):
                return f"continues after {followed['first_new_s']:.1f} s"
            if job.process.poll() is not None:
                return f"ends with {job.process.poll()} after {time.time() - killed:.1f} s"
            time.sleep(0.1)
        return f"nothing new after {GIVE_UP_S:g} s"


def timed(plan: Plan, own: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Returns the seconds of iterations by case and round; all jobs run without faults, and take turns."""
    plan, seconds = dataclasses.replace(plan, iterations=ENDLESS, takes_turns=True), {case.name: [] for case in CASES}
    with contextlib.ExitStack() as stack:
        jobs = {}
        for case in CASES:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="public-moevement-")))
            jobs[case.name] = stack.enter_context(start(case, plan, directory))
            warm_up(jobs[case.name], own.warm_up)
        for job in jobs.values():
            settle(job)
        try:
            for told in slices(jobs, own.rounds, own.seconds):
                if not all(told.values()):
                    continue  # the machine was busy: some turn completed no iteration
                for name, events in told.items():
                    seconds[name].append([event["elapsed_s"] for event in events])
                print("  ".join(f"{name} {median(rounds[-1]):.4f}" for name, rounds in seconds.items()), flush=True)
        except RuntimeError as error:  # the public job may exit, ours may not
            ours = any(job.process.poll() is not None for name, job in jobs.items() if name.startswith("ours"))
            if ours or len(seconds[CASES[0].name]) < ENOUGH:
                raise
            print(f"after {len(seconds[CASES[0].name])} rounds {error}", flush=True)
    return seconds


def settle(job: Job) -> None:
    """Continues a job that was stopped while others started; ours may need to reconnect."""
    begin = time.time()
    resume(job)
    job.wait_for(lambda: sum(e["time"] > begin for e in job.events.of("iteration")) > SETTLED, "settled iterations")
    pause(job)


def undisturbed(plan: Plan, chance: random.Random) -> tuple[dict, dict, dict]:
    """Runs jobs without faults; returns snapshot bytes, distances from their system's first end, and these ends."""
    amounts, apart, ends = {}, {}, {}
    for case in (case for case in CASES if case.window):
        events, end, _ = run(case, plan, chance)
        amounts[case.name] = figures.snapshot_bytes(events, case.window)
        assert end is not None  # it saves snapshots
        apart[case.name] = figures.differences(end, ends.setdefault(case.system, end))
        print(f"{case.name:40} {sum(amounts[case.name]) / case.window / 1e6:.1f} MB", flush=True)
    return amounts, apart, ends


def disturbed(plan: Plan, ends: dict, chance: random.Random) -> dict[str, dict]:
    """Returns the recovery's figures by case with a fault, and the distance from the end without one."""
    told = {}
    for case in (Case(s, w, victim) for w in WINDOWS if w for victim in VICTIMS[w] for s in SYSTEMS):
        try:
            events, end, followed = run(case, plan, chance)
        except RuntimeError as error:
            told[case.name] = {"failed": figures.reason(str(error))}
            print(error, flush=True)
            continue
        assert end is not None and followed is not None  # it saves snapshots, and a worker is killed
        told[case.name] = followed | figures.differences(end, ends[case.system])
        told[case.name]["snapshot_bytes_at_end"] = figures.snapshot_bytes(events, case.window, last=True)
        shown = "{first_new_s:.2f} s, {again} again, {identical} of {parameters} identical, {largest:.2g} apart"
        print(f"{case.name:40}", shown.format(**told[case.name]), flush=True)
    return told


def main() -> None:
    """Runs all cases and writes the results."""
    parser = command_line(__doc__)
    parser.add_argument("--peer", type=Path, required=True, metavar="CHECKOUT")
    parser.add_argument("--peer-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--saving", default=SAVING, help=f"flags of our checkpoints; the window is appended ({SAVING})")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=30, help="of a turn for each job that is timed (default: 30)")
    parser.add_argument("--seconds", type=float, default=2.5, help="of a turn, at most 2.5 (default: 2.5)")
    parser.add_argument("--warm-up", type=int, default=10, help="iterations that are not timed (default: 10)")
    parser.add_argument("--iterations", type=int, default=40, help="of each job that runs to its end (default: 40)")
    parser.add_argument("--seed", type=int, default=0)
    own = parser.parse_args()
    python = os.path.abspath(shutil.which(own.peer_python) or own.peer_python)  # jobs run in their own directories
    plan = Plan(own.peer.resolve(), python, own.precision, own.saving, own.iterations)
    chance, here = random.Random(own.seed), machine(load=True)
    seconds = timed(plan, own)
    iterations = {}
    for system in SYSTEMS:
        of_system = {name: rounds for name, rounds in seconds.items() if name.startswith(system)}
        iterations[system] = figures.overheads(of_system, Case(system, 0).name)
    amounts, apart, ends = undisturbed(plan, chance)
    told = {
        "machine": here,
        "peer": (own.peer / "version.txt").read_text().strip(),
        "model": SHAPE | {"precision": own.precision, "workers": WORKERS},
        "our_flags": our_flags(Case("ours", 0), plan),
        "our_saving": own.saving,
        "iterations": iterations,
        "snapshot_bytes": amounts,
        "without_faults": apart,
        "faults": disturbed(plan, ends, chance),
        "outcomes": {name: outcome(case, plan, chance) for name, case in OUTCOMES.items()},
        "seconds": seconds,
    }
    print(figures.tables(told))
    for name, what in told["outcomes"].items():
        print(f"{name}: {what}")
    write_json(own.output, told)


if __name__ == "__main__":
    main()
