"""Measures how a snapshot in each iteration changes the iteration time of a real model on one GPU.

    python benchmarks/device_training.py --output docs/results/gpu_training.json

One worker trains a mixture of experts in bf16 (policy full, tier memory) with about 1, 2 and 3 GB of master weights and
moments.  Each model trains with a snapshot in each iteration, and without snapshots.  The smallest one also runs with
``CUDA_DEVICE_MAX_CONNECTIONS=1``, and with experts padded to capacity, where MoE layers do not wait for token counts.
The program prints median iteration times and their ratio.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, show, table, write_json
from benchmarks.live.job import PROGRAM, ROOT, SHARED, launcher

MODEL = """--hidden-size 512 --ffn-hidden-size 1024 --num-attention-heads 8 --num-experts 8 --moe-router-topk 2
    --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall --position-embedding-type rope --swiglu
    --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights --mock-data
    --tokenizer-type NullTokenizer --vocab-size 8191 --seq-length 1024 --transformer-impl local --eval-iters 0
    --num-workers 1 --bf16 --use-distributed-optimizer --micro-batch-size 4 --global-batch-size 16 --lr 1e-4
    --log-interval 10 --ckpt-policy full --ckpt-tier memory""".split()
PADDED = "--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity".split()
ITERATIONS, WARM = 30, 6
NEVER = 10 * ITERATIONS
"""Interval of snapshots that a run does not reach."""


@dataclass(frozen=True)
class Case:
    """One trained configuration.

    Attributes:
        name: in the table.
        layers: number of layers, 14 million parameters each.
        flags: in addition to the model's flags.
        connections: value of ``CUDA_DEVICE_MAX_CONNECTIONS``; None to unset it.
    """

    name: str
    layers: int
    flags: tuple[str, ...] = ()
    connections: str | None = None


CASES = (
    Case("85 M parameters", 6),
    Case("170 M", 12),
    Case("250 M", 18),
    Case("85 M, one connection", 6, connections="1"),
    Case("85 M, padded", 6, flags=tuple(PADDED)),
)


def flags_for(case: Case, interval: int) -> list[str]:
    """Returns the flags of a case with a snapshot in each ``interval``-th iteration, and none in storage."""
    sizes = ["--num-layers", str(case.layers), "--train-iters", str(ITERATIONS)]
    return [*MODEL, *sizes, *case.flags, "--snapshot-interval", str(interval), "--persist-interval", str(10 * NEVER)]


def seconds(case: Case, interval: int) -> list[float]:
    """Trains, and returns the seconds of each iteration except the first ones."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    if case.connections is not None:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = case.connections
    with tempfile.TemporaryDirectory(prefix="moc-device-", dir=os.environ.get("TEST_MEMORY", SHARED)) as directory:
        places = f"--log-dir {directory}/log --ckpt-dir {directory}/saved --ckpt-memory-dir {directory}/memory".split()
        command = [sys.executable, *launcher(1), PROGRAM, *flags_for(case, interval), *places]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{case.name}: the job has failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        events = map(json.loads, Path(directory, "log", "events.jsonl").read_text().splitlines())
        return [e["elapsed_s"] for e in events if e["type"] == "iteration"][WARM:]


def main() -> None:
    """Measures, prints the results, and writes all samples."""
    import torch

    own = command_line(__doc__).parse_args()
    if not torch.cuda.is_available():
        sys.exit("There is no NVIDIA GPU that torch can use here: run this where there is one.")
    told, rows = [], []
    for case in CASES:
        without, with_one = seconds(case, NEVER), seconds(case, 1)
        told.append(asdict(case) | {"without_s": without, "with_s": with_one})
        medians = statistics.median(without), statistics.median(with_one)
        rows.append((case.name, *(f"{1e3 * one:.1f}" for one in medians), f"{medians[1] / medians[0]:.3f}"))
        write_json(own.output, {"device": torch.cuda.get_device_name(), "machine": machine(), "cases": told})
    columns = ("model", "without ms", "with ms", "with/without")
    show(80, [(table("a snapshot in every iteration", columns, rows), [])])


if __name__ == "__main__":
    main()
