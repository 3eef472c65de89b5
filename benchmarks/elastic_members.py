"""Measures how long a job pauses when a node is lost and returns: in process, with new processes, or with torchrun.

    python benchmarks/elastic_members.py --output docs/results/elastic_members_cpu.json

Four launchers on this machine are the nodes, each with one worker.  One of them is killed with all its processes and
started again later, several times.  All variants save each iteration to disk:

* ``in process``: ``--elastic``; surviving workers keep their state and receive missing state from each other;
* ``anew``: without it; all workers are forked from warm processes and read the newest snapshot;
* ``restarted``: a job of fixed size under torchrun.  One of four workers is killed; torchrun ends the others and starts
  all again.  They import everything and read the newest snapshot.  No node has to return.

*Lost* is the time from the kill to the first new iteration.  *Still* is *lost* less the time of an iteration, which
differs between the variants (median before the kill).  *Taken in* is the time from the last iteration of fewer nodes to
the first one of all.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.live.job import KIND, PROGRAM, Job, free_ports, torchrun

NODES, LOST, ROUNDS, SETTLE = 4, 2, 4, 4
MODEL = """--hidden-size 64 --ffn-hidden-size 96 --num-experts 8 --seq-length 64 --max-position-embeddings 64
    --vocab-size 255 --micro-batch-size 1 --global-batch-size 12 --lr 1e-3 --train-iters 100000
    --calculate-per-token-loss
    --ckpt-policy full --ckpt-tier disk --snapshot-interval 1""".split()
WAYS = {"in process": ["--elastic", "--elastic-slots", "6"], "anew": []}


class Nodes:
    """The launchers of a job; the first one's events describe the complete job."""

    def __init__(self, way: str, files: Path, stack: ExitStack):
        address, self._token = f"127.0.0.1:{free_ports(1)[0]}", {"MOC_TOKEN": secrets.token_hex(32)}
        own = ["--nnodes", f"2:{NODES}", "--nproc-per-node", 1, "--rdzv-endpoint", address, "--grow-wait", 600]
        self._launcher, self._files, self._stack = ["-m", "moc.launch", *own], files, stack
        places = ["--ckpt-dir", files / "snapshots", "--exit-signal-handler"]
        self._program = [PROGRAM, *KIND, *MODEL, *WAYS[way], *places]
        self.jobs = [self.start(node) for node in range(NODES)]

    def start(self, node: int) -> Job:
        """Starts a node, for the first time or again."""
        directory = self._files / f"{node}-{time.monotonic_ns()}"
        directory.mkdir()
        command = [*self._launcher, "--node-rank", node, *self._program]
        return self._stack.enter_context(Job(command, directory, environment=self._token))

    def lose(self) -> None:
        """Kills a node with all its processes."""
        self.jobs[LOST].process.kill()  # the node's other processes end with their launcher
        self.jobs[LOST].__exit__()

    def starts(self, size: int, after: float) -> float:
        """Returns when this many workers first started to train together after a given time."""
        fits = lambda one: one["time"] > after and one["world_size"] == size  # noqa: E731
        return first_of(self.jobs[0], "start", fits)["time"]


def last_before(job: Job, moment: float) -> dict:
    """Returns the newest iteration that was complete at a given time."""
    return max((one for one in job.events.of("iteration") if one["time"] < moment), key=lambda one: one["iteration"])


def new_after(job: Job, moment: float) -> float:
    """Returns when the first new iteration completed after a given time; repeated iterations do not count."""
    last = last_before(job, moment)["iteration"]
    return first_of(job, "iteration", lambda one: one["iteration"] > last)["time"]


def first_of(job: Job, kind: str, fits: Callable[[dict], bool]) -> dict:
    """Waits for the first event of a kind that satisfies a condition."""
    return job.wait_for(lambda: next(filter(fits, job.events.of(kind)), None), f"an event {kind}")


def measure(way: str) -> dict[str, list[float]]:
    """Returns the seconds of each round, by figure."""
    found: dict[str, list[float]] = {"lost_s": [], "still_s": [], "taken_in_s": [], "iteration_s": []}
    with tempfile.TemporaryDirectory(prefix="members-") as files, ExitStack() as stack:
        nodes = Nodes(way, Path(files), stack)
        first = nodes.jobs[0]
        first.reach(SETTLE)
        for _ in range(ROUNDS):
            first.reach(first.iteration + SETTLE)
            recent = first.events.of("iteration")[-SETTLE:]
            found["iteration_s"].append(median(one["elapsed_s"] for one in recent))
            killed = time.time()
            nodes.lose()
            found["lost_s"].append(new_after(first, nodes.starts(NODES - 1, after=killed)) - killed)
            found["still_s"].append(found["lost_s"][-1] - found["iteration_s"][-1])
            first.reach(first.iteration + SETTLE)
            came = time.time()
            nodes.jobs[LOST] = nodes.start(LOST)
            grown = nodes.starts(NODES, after=came)
            found["taken_in_s"].append(new_after(first, grown) - last_before(first, grown)["time"])
            print(f"{way}: " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in found.items()), flush=True)
    return {name: [round(value, 4) for value in values] for name, values in found.items()}


def measure_restarts() -> dict[str, list[float]]:
    """Returns the seconds of each round of the job that torchrun restarts."""
    found: dict[str, list[float]] = {"lost_s": [], "still_s": [], "iteration_s": []}
    with tempfile.TemporaryDirectory(prefix="members-") as files:
        program = [PROGRAM, *KIND, *MODEL, "--ckpt-dir", Path(files) / "snapshots"]
        with Job([*torchrun(NODES), *program], files) as job:
            job.reach(SETTLE)
            for number in range(ROUNDS):
                job.reach(job.iteration + SETTLE)
                usual = median(one["elapsed_s"] for one in job.events.of("iteration")[-SETTLE:])
                killed = time.time()
                os.kill(random.Random(number).choice(sorted(job.workers().values())), signal.SIGKILL)
                again = first_of(job, "start", lambda one, at=killed: one["time"] > at)["time"]
                found["lost_s"].append(new_after(job, again) - killed)
                found["still_s"].append(found["lost_s"][-1] - usual)
                found["iteration_s"].append(usual)
                print("restarted: " + ", ".join(f"{name} {of[-1]:.3f}" for name, of in found.items()), flush=True)
    return {name: [round(value, 4) for value in values] for name, values in found.items()}


def main() -> None:
    """Measures all variants; writes medians, and ratios of the first variant to the others."""
    given = command_line(__doc__).parse_args()
    rounds = {way: measure(way) for way in WAYS} | {"restarted": measure_restarts()}
    medians = {way: {name: round(median(values), 4) for name, values in of.items()} for way, of in rounds.items()}
    ours, *others = medians
    ratios = {
        f"{ours} by {other}": {name: round(medians[ours][name] / value, 3) for name, value in medians[other].items()}
        for other in others
    }
    anew, restarted = (ratios[f"{ours} by {other}"] for other in others)
    say(
        {
            "after a loss, a job that continues in process pauses at most half the time of a new job": anew["still_s"]
            <= 0.5,
            "it reaches its first new iteration in at most half the time of a restarted job": restarted["lost_s"]
            <= 0.5,
        }
    )
    write_json(given.output, {"machine": machine(load=True), "median": medians} | ratios | {"rounds": rounds})


if __name__ == "__main__":
    main()
