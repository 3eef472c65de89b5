"""What our launcher and snapshots cost when nothing fails: the same program, with them and under torchrun without.

    python benchmarks/launch_overhead.py --output docs/results/launch_overhead_cpu.json

Three ways, one after the other, again and again: *torchrun* with no policy at all; our launcher with snapshots of
everything in memory at each iteration (*ours, interval 1*); and at a long interval (*ours, interval 50*).  Compared are
the iterations of the same round, after those of the warm-up: their median, and their sum, which also has what few
iterations pay, as the one in which a snapshot begins.  A ratio of 0.98 says 98 % of torchrun's throughput.

Flags that are not the benchmark's own are the program's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.live.job import PROGRAM, Job, launcher, torchrun

MODEL = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256 --num-experts 8
    --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall
    --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --transformer-impl local --use-distributed-optimizer
    --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --eval-iters 0 --num-workers 0
    --pipeline-model-parallel-size 2 --expert-model-parallel-size 2""".split()
WORKERS = 4
BASE = "torchrun"
CASES = {BASE: None, "ours, interval 1": 1, "ours, interval 50": 50}  # name: iterations between snapshots
GOAL = 0.98


def run(case: str, warm_up: int, iterations: int, flags: Sequence[str]) -> list[float]:
    """Seconds of each iteration after the warm-up."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        directory, every = Path(name), CASES[case]
        memory = None if every is None else Path("/dev/shm") / directory.name
        start = torchrun(WORKERS) if every is None else launcher(WORKERS)
        saving = [] if every is None else ["--ckpt-policy", "full", "--ckpt-tier", "memory"]
        saving += [] if every is None else ["--snapshot-interval", every, "--ckpt-dir", directory / "snapshots"]
        last = warm_up + iterations
        command = [*start, PROGRAM, *MODEL, *flags, "--train-iters", last, *saving]
        with Job(command, directory, memory) as job:
            if job.process.wait() != 0:
                raise RuntimeError(f"{case} failed:\n{job.last_words()}")
            return [e["elapsed_s"] for e in job.events.of("iteration") if e["iteration"] > warm_up]


def ratios(rounds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, dict]:
    """By case, torchrun's seconds divided by its own: of medians and of sums, for each round, and their medians.

    Args:
        rounds: of each, by case, seconds of its iterations.
    """
    told = {}
    for case in rounds[0]:
        by = {
            kind: [of(one[BASE]) / of(one[case]) for one in rounds] for kind, of in (("median", median), ("sum", mean))
        }
        told[case] = {kind: {"median": median(values), "rounds": values} for kind, values in by.items()}
    return told


def main() -> None:
    """Runs all rounds, and writes what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="of all cases (default: 8)")
    parser.add_argument("--warm-up", type=int, default=20, help="iterations that do not count (default: 20)")
    parser.add_argument("--iterations", type=int, default=100, help="that count (default: 100)")
    parser.add_argument("--output", type=Path, help="JSON file")
    own, flags = parser.parse_known_args()
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    machine["load_before"], rounds = os.getloadavg()[0], []
    for number in range(own.rounds):
        order = list(CASES) if number % 2 == 0 else list(reversed(CASES))
        told = {case: run(case, own.warm_up, own.iterations, flags) for case in order}
        rounds.append({case: told[case] for case in CASES})
        print("  ".join(f"{case} {median(seconds):.4f}" for case, seconds in rounds[-1].items()), flush=True)
    found = ratios(rounds)
    for case in CASES:
        of = {kind: found[case][kind]["median"] for kind in ("median", "sum")}
        verdict = "" if case == BASE else f"  {'holds' if min(of.values()) >= GOAL else 'DOES NOT HOLD'}: {GOAL}"
        print(f"{case:18} of medians {of['median']:.3f}, of sums {of['sum']:.3f}{verdict}")
    if own.output is not None:
        told = {"machine": machine, "flags": [*MODEL, *flags], "goal": GOAL, "ratios": found, "seconds": rounds}
        own.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
