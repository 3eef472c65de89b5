"""How long a job of 2 to 4 nodes stands still when a node is lost and when it comes back: in process, and started anew.

    python benchmarks/elastic_members.py --output docs/results/elastic_members_cpu.json

Four launchers on this machine are the nodes, each with one worker.  One of them is killed with all its processes, and
started again later, a few times.  Each way saves every iteration to disk:

* ``in process``: ``--elastic``; workers that are left keep their state, and get from one another what they lack;
* ``anew``: without it; all workers are started anew from warm processes, and read the newest snapshot.

*Lost* is the time from the kill to the first new iteration; *still* the same less the time of an iteration, which
differs between the ways (median of those before the kill); *taken in* the time from the last iteration of fewer nodes
to the first of all.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.live.job import KIND, PROGRAM, Job, free_ports

NODES, LOST, ROUNDS, SETTLE = 4, 2, 4, 4
MODEL = """--hidden-size 64 --ffn-hidden-size 96 --num-experts 8 --seq-length 64 --max-position-embeddings 64
    --vocab-size 255 --micro-batch-size 1 --global-batch-size 12 --lr 1e-3 --train-iters 100000
    --calculate-per-token-loss --exit-signal-handler
    --ckpt-policy full --ckpt-tier disk --snapshot-interval 1""".split()
WAYS = {"in process": ["--elastic", "--elastic-slots", "6"], "anew": []}


class Nodes:
    """The launchers of a job; the first one tells everything."""

    def __init__(self, way: str, files: Path, stack: ExitStack):
        address, self._token = f"127.0.0.1:{free_ports(1)[0]}", {"MOC_TOKEN": secrets.token_hex(32)}
        own = ["--nnodes", f"2:{NODES}", "--nproc-per-node", 1, "--rdzv-endpoint", address, "--grow-wait", 600]
        self._launcher, self._files, self._stack = ["-m", "moc.launch", *own], files, stack
        self._program = [PROGRAM, *KIND, *MODEL, *WAYS[way], "--ckpt-dir", files / "snapshots"]
        self.jobs = [self.start(node) for node in range(NODES)]

    def start(self, node: int) -> Job:
        """Starts a node, the first time or again."""
        directory = self._files / f"{node}-{time.monotonic_ns()}"
        directory.mkdir()
        command = [*self._launcher, "--node-rank", node, *self._program]
        return self._stack.enter_context(Job(command, directory, environment=self._token))

    def lose(self) -> None:
        """Kills a node with all its processes."""
        self.jobs[LOST].process.kill()  # all others die with the launcher
        self.jobs[LOST].__exit__()

    def starts(self, size: int, after: float) -> float:
        """When so many workers have started to train together, after a moment."""
        return self._first("start", lambda one: one["time"] > after and one["world_size"] == size)["time"]

    def last_before(self, moment: float) -> dict:
        """The newest iteration that was complete by then."""
        return max(
            (one for one in self.jobs[0].events.of("iteration") if one["time"] < moment),
            key=lambda one: one["iteration"],
        )

    def new_after(self, moment: float) -> float:
        """When the first iteration is complete that had not been by then; those computed again do not count."""
        last = self.last_before(moment)["iteration"]
        return self._first("iteration", lambda one: one["iteration"] > last)["time"]

    def _first(self, kind: str, fits: Callable[[dict], bool]) -> dict:
        watched = self.jobs[0]
        return watched.wait_for(lambda: next(filter(fits, watched.events.of(kind)), None), f"an event {kind}")


def measure(way: str) -> dict[str, list[float]]:
    """Seconds, of each round."""
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
            found["lost_s"].append(nodes.new_after(nodes.starts(NODES - 1, after=killed)) - killed)
            found["still_s"].append(found["lost_s"][-1] - found["iteration_s"][-1])
            first.reach(first.iteration + SETTLE)
            came = time.time()
            nodes.jobs[LOST] = nodes.start(LOST)
            grown = nodes.starts(NODES, after=came)
            found["taken_in_s"].append(nodes.new_after(grown) - nodes.last_before(grown)["time"])
            print(f"{way}: " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in found.items()), flush=True)
    return {name: [round(value, 4) for value in values] for name, values in found.items()}


def main() -> None:
    """Measures both ways, and writes medians and their ratios."""
    given = command_line(__doc__).parse_args()
    rounds = {way: measure(way) for way in WAYS}
    medians = {way: {name: round(median(values), 4) for name, values in of.items()} for way, of in rounds.items()}
    ours, other = (medians[way] for way in WAYS)
    ratios = {name: round(ours[name] / other[name], 3) for name in ours}
    say({"after a loss, a job in process stands still at most half as long": ratios["still_s"] <= 0.5})
    write_json(given.output, {"machine": machine(), "median": medians, "in process by anew": ratios, "rounds": rounds})


if __name__ == "__main__":
    main()
