"""Checks whether processes accumulate memory, threads or descriptors while a node is lost and returns many times.

    python benchmarks/elastic_generations.py --output docs/results/generations_elastic_cpu.json

An elastic job has three nodes, each a launcher with one worker.  It repeatedly loses the last node with all processes,
continues in process, and includes the node again.  After each change the program samples four processes of the first
node: worker, launcher (agent), controller and forkserver.  It records unique memory (USS), resident memory, threads and
descriptors.  The worker's process must remain the same.

The verdict is the slope of a line through the second half of the changes, for each process and figure.  The first fifty
changes fill bounded tables of members and iterations in a worker.  Fewer nodes need fewer descriptors and different
memory, so a loss and the next growth are averaged.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.generations import creeping, slopes
from benchmarks.live.job import KIND, PROGRAM, look, running
from benchmarks.live.members import Nodes

NODES, LEAST, LOST = 3, 2, 2
MODEL = """--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-experts 8 --seq-length 32
    --max-position-embeddings 32 --vocab-size 255 --micro-batch-size 1 --global-batch-size 12 --lr 1e-4
    --train-iters 100000 --calculate-per-token-loss --exit-signal-handler --elastic --elastic-slots 6
    --elastic-rebalance-interval 10 --ckpt-policy full --ckpt-tier disk --snapshot-interval 20 --ckpt-keep 2""".split()
LAUNCHER = ["--nnodes", f"{LEAST}:{NODES}", "--nproc-per-node", 1, "--grow-wait", 600, "--silence-timeout", 30]
SETTLE = 2
"""Iterations between two changes."""


def measure(changes: int, files: Path, stack: ExitStack) -> dict:
    """Returns samples of the first node's processes after each change."""
    nodes = Nodes([PROGRAM, *KIND, *MODEL, "--ckpt-dir", files / "snapshots"], files, stack, LAUNCHER, NODES)
    first = nodes.jobs[0]
    first.wait_for(lambda: nodes.size == NODES and nodes.iteration >= SETTLE, "the first iterations")
    worker, launcher = nodes.worker(0), first.process.pid
    assert worker is not None  # it trains
    watched = {"worker": worker, "agent": psutil.Process(launcher)}
    watched |= {who: running(launcher, f"moc.runtime.{who}")[0] for who in ("controller", "zygote")}
    samples = {who: [look(process)] for who, process in watched.items()}
    for number in range(changes):
        if number % 2:
            nodes.start(LOST)
        else:
            nodes.lose(LOST)
        wanted, at = NODES - 1 + number % 2, nodes.iteration
        settled = lambda at=at, wanted=wanted: nodes.size == wanted and nodes.iteration >= at + SETTLE  # noqa: E731
        first.wait_for(settled, f"iterations of {wanted} nodes")
        for who, process in watched.items():
            samples[who].append(look(process))
        told = "  ".join(f"{name} {value:.4g}" for name, value in samples["worker"][-1].items())
        print(f"{number + 1:3} changes: {told}", flush=True)
    told = [event["iteration"] for event in nodes.events.of("iteration")]
    return {
        "samples": samples,
        "worker is the same": watched["worker"].is_running(),
        "iterations": len(told),
        "computed twice": len(told) - len(set(told)),
        "fallbacks": len(nodes.events.of("fallback")),
        "changes": len(nodes.events.of("start")) - 1,
    }


def cycles(samples: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Returns means of each loss and the next growth; the first sample and an odd last one are omitted."""
    pairs = zip(samples[1::2], samples[2::2], strict=False)
    return [{name: (lost[name] + grown[name]) / 2 for name in lost} for lost, grown in pairs]


def main() -> int:
    """Measures, and writes the growth per change; returns 1 if a figure grows too fast."""
    parser = command_line(__doc__)
    parser.add_argument("--changes", type=int, default=100, help="of members (default: %(default)s)")
    own = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="elastic-generations-") as files, ExitStack() as stack:
        told = measure(own.changes, Path(files), stack)
    by_cycle = {who: slopes(cycles(of)) for who, of in told["samples"].items()}
    adds = {who: {name: slope / 2 for name, slope in of.items()} for who, of in by_cycle.items()}
    grown = creeping(adds)
    held = say(
        {
            f"nothing of {', '.join(adds)} creeps ({'; '.join(grown) or 'all flat'})": not grown,
            "the worker's process is the same": told["worker is the same"],
            "no iteration is computed twice, and no checkpoint is read": not (
                told["computed twice"] + told["fallbacks"]
            ),
        }
    )
    write_json(own.output, {"machine": machine(), "each change adds": adds} | told)
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
