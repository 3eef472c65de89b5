"""Measures how fast an elastic job trains with fewer nodes, with simulated device time.

    python benchmarks/elastic_speed.py --output docs/results/elastic_speed_cpu.json

A job of six nodes, each a launcher with one worker, loses one node after the other until three remain, and continues in
process.  Workers share the cores of this machine, so a batch would take as long with three workers as with six.
Therefore each real micro batch sleeps (``--sleep``), as if a device computed it; dummy micro batches do not.  The model
is so small that other time is negligible.

The global batch of B micro batches takes ceil(B / D) rounds on D workers.  *Speed* is the median iteration time of six
workers divided by the median time of D, and is compared with ceil(B / 6) / ceil(B / D).  The first iteration with new
members does not count: ``benchmarks/elastic_members.py`` measures the pause of a change.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.live.job import KIND, ROOT
from benchmarks.live.members import Nodes

NODES, LEAST, WITHIN = 6, 3, 0.1
PROGRAM = str(ROOT / "benchmarks/live/device_time.py")
MODEL = """--num-layers 1 --hidden-size 32 --ffn-hidden-size 48 --num-experts 8 --seq-length 16
    --max-position-embeddings 16 --vocab-size 255 --micro-batch-size 1 --lr 1e-4 --train-iters 100000
    --calculate-per-token-loss --elastic --elastic-slots 6 --ckpt-policy full --ckpt-tier disk
    --snapshot-interval 1000000""".split()
LAUNCHER = ["--nnodes", f"{LEAST}:{NODES}", "--nproc-per-node", 1, "--grow-wait", 600, "--silence-timeout", 30]


def rounds(batch: int, workers: int) -> int:
    """Returns the micro batches of the worker that has most."""
    return -(-batch // workers)


def measure(batch: int, iterations: int, files: Path, stack: ExitStack) -> dict[int, list[float]]:
    """Returns the seconds of each iteration, by number of workers."""
    program = [PROGRAM, *KIND, *MODEL, "--global-batch-size", batch, "--ckpt-dir", files / "snapshots"]
    nodes, found = Nodes(program, files, stack, LAUNCHER, NODES), {}
    for workers in range(NODES, LEAST - 1, -1):
        if workers < NODES:
            nodes.lose(workers)
        nodes.jobs[0].wait_for(lambda wanted=workers: nodes.size == wanted, f"{workers} workers")
        nodes.jobs[0].reach(nodes.iteration + iterations + 1)
        found[workers] = [event["elapsed_s"] for event in nodes.events.of("iteration")[-iterations:]]
        print(f"{workers} workers: " + "  ".join(f"{seconds:.3f}" for seconds in found[workers]), flush=True)
    return found


def speeds(batch: int, seconds: dict[int, list[float]]) -> dict[int, dict[str, float]]:
    """Returns median seconds, rounds, measured and expected speed, by number of workers."""
    most = median(seconds[NODES])
    told = {}
    for workers, taken in seconds.items():
        speed, promised = most / median(taken), rounds(batch, NODES) / rounds(batch, workers)
        figures = {"iteration_s": median(taken), "rounds": rounds(batch, workers), "speed": speed, "promised": promised}
        told[workers] = {name: round(value, 4) for name, value in (figures | {"off": speed / promised - 1}).items()}
    return told


def main() -> int:
    """Measures, and writes the results; returns 1 if a speed deviates too far from the expected one."""
    parser = command_line(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[60], metavar="B", help="micro batches (default: 60)")
    parser.add_argument("--sleep", type=float, default=1.0, help="seconds of a micro batch (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=3, help="with each number of workers (default: %(default)s)")
    own = parser.parse_args()
    os.environ["DEVICE_TIME_S"] = str(own.sleep)
    told, samples = {}, {}
    for batch in own.batches:
        with tempfile.TemporaryDirectory(prefix="elastic-speed-") as files, ExitStack() as stack:
            samples[batch] = measure(batch, own.iterations, Path(files), stack)
        told[batch] = speeds(batch, samples[batch])
    near = {
        f"with a batch of {batch}, {workers} workers are within {WITHIN:.0%} of {one['promised']:.3f} of the speed of "
        f"{NODES}: {one['speed']:.3f}": abs(one["off"]) <= WITHIN
        for batch, of in told.items()
        for workers, one in of.items()
        if workers != NODES
    }
    write_json(own.output, {"machine": machine(load=True), "sleep_s": own.sleep, "speed": told, "samples": samples})
    return int(not say(near))


if __name__ == "__main__":
    sys.exit(main())
