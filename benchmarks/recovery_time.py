"""Measures how long a job pauses when a worker is killed: ours, torchrun with our checkpoints, and torchrun with DCP.

    python benchmarks/recovery_time.py --output docs/results/recovery_time_cpu.json

Each case trains the same model with 4 workers (PP2 x EP2) and saves after every iteration.  Several times, one of its
workers is killed by SIGKILL at a random moment of an iteration:

* ``ours``: ``python -m moc.launch``, snapshots of the full state in memory or on disk;
* ``ours, gradients``: the same with bases and gradients in memory, windows of three (``--ckpt-policy gradient``);
* ``ours, windows``: the same with sparse snapshots and upstream logs in memory, windows of three (MoEvement);
* ``torchrun``: the same program, restarted by torchrun;
* ``torchrun, DCP``: a job that saves with ``torch.distributed.checkpoint`` (``benchmarks/live/dcp_job.py``);
* ``beside, memory``, ``beside, disk``: as ``ours``, with the checkout of ``--beside``.

Seconds after the kill: *detected*, the launcher reports the loss; *survivors unblocked*, a waiting worker has left its
collective; *first collective* of the new generation is done; *planned*, the sources of the state are known; *loaded*;
*first iteration*.  *Outside useful work* is the time from the last new iteration before the kill to the next new one,
less the time of an iteration (median before the kill).  It includes repeated iterations and the lost part of one.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.live.job import MODEL, PP2_EP2, ROOT, Job, launcher, torchrun
from benchmarks.live.recoveries import CHAIN, NOTICED, OUTSIDE, claims, medians, recovery

WORKERS = 4
PROGRAM = "pretrain_gpt_moe.py"
SETTLE = 5  # iterations before the next kill


@dataclass(frozen=True)
class Case:
    """One measured configuration."""

    launcher: str  # ``ours`` or ``torchrun``
    tier: str | None  # of our snapshots; None for the job that saves with DCP
    checkout: Path = ROOT  # source of the program and the launcher
    saving: str = "--ckpt-policy full --snapshot-interval 1"

    def job(self, directory: str) -> Job:
        """Starts the job."""
        start = launcher(WORKERS) if self.launcher == "ours" else torchrun(WORKERS)
        if self.tier is None:
            program = [ROOT / "benchmarks/live/dcp_job.py", "--checkpoints", f"{directory}/checkpoints", "--every", 1]
            return Job([*start, *program, *MODEL, *PP2_EP2], directory)
        command = [*start, self.checkout / PROGRAM, *MODEL, *PP2_EP2, *self.saving.split(), "--ckpt-tier", self.tier]
        return Job(command, directory, saves=True, environment={"PYTHONPATH": str(self.checkout)})


CASES = {
    "ours, memory": Case("ours", "memory"),
    "ours, disk": Case("ours", "disk"),
    "ours, gradients": Case("ours", "memory", saving="--ckpt-policy gradient --gradient-window 3"),
    "ours, windows": Case("ours", "memory", saving="--ckpt-policy sparse --sparse-window 3 --upstream-logging"),
    "torchrun, memory": Case("torchrun", "memory"),
    "torchrun, disk": Case("torchrun", "disk"),
    "torchrun, DCP": Case("torchrun", None),
}


def cases_of(names: Sequence[str], beside: Path | None) -> Iterator[tuple[str, Case]]:
    """Yields the cases in order; another checkout's case follows ours, so that both see the same machine load."""
    for name in names:
        yield name, CASES[name]
        if beside is not None and CASES[name].launcher == "ours":
            yield name.replace("ours", "beside"), replace(CASES[name], checkout=beside.absolute())


def measure(case: Case, kills: int, seed: int) -> list[dict[str, float]]:
    """Kills workers of a job in turn; returns the figures of each recovery."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory, case.job(directory) as job:
        return [kill_one(job, case, chance) for _ in range(kills)]


def kill_one(job: Job, case: Case, chance: random.Random) -> dict[str, float]:
    """Kills a worker at a random moment of an iteration, and waits for a new iteration."""
    job.reach(job.iteration + SETTLE)
    usual = median(event["elapsed_s"] for event in job.events.of("iteration")[-SETTLE + 1 :])
    time.sleep(chance.uniform(0, usual))
    pid, killed = chance.choice(sorted(job.workers().values())), time.time()
    os.kill(pid, signal.SIGKILL)
    so_far: Callable = lambda: recovery(job.events.all(), job.said, NOTICED[case.launcher], killed, usual)  # noqa: E731
    return job.wait_for(so_far, "a new iteration")


def main() -> None:
    """Runs all cases, and writes the results."""
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each case (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout, after each of our own cases")
    own = parser.parse_args()
    here, samples, summary = machine(load=True), {}, {}
    for name, case in cases_of(own.cases, own.beside):
        samples[name] = measure(case, own.kills, own.seed)
        summary[name] = of = medians(samples[name])
        figures = [f"{what} {of[what]:.3f}" for what in (*CHAIN, OUTSIDE, "iterations again") if what in of]
        print(f"{name:18}", "  ".join(figures), flush=True)
    held = claims(summary)
    say(held)
    told = {"machine": here, "flags": [*MODEL, *PP2_EP2], "medians": summary, "claims": held, "samples": samples}
    write_json(own.output, told)


if __name__ == "__main__":
    main()
