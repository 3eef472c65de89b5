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
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.live.job import PROGRAM, launcher, torchrun
from benchmarks.live.turns import in_turns, ratios, run_to_end

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
    every = CASES[case]
    start = torchrun(WORKERS) if every is None else launcher(WORKERS)
    saving = [] if every is None else ["--ckpt-policy", "full", "--ckpt-tier", "memory", "--snapshot-interval", every]
    command = [*start, PROGRAM, *MODEL, *flags, "--train-iters", warm_up + iterations, *saving]
    events = run_to_end(command, saves=every is not None, memory=every is not None)
    return [e["elapsed_s"] for e in events if e["type"] == "iteration" and e["iteration"] > warm_up]


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
    for told in in_turns(list(CASES), own.rounds, lambda case: run(case, own.warm_up, own.iterations, flags)):
        rounds.append(told)
        print("  ".join(f"{case} {median(seconds):.4f}" for case, seconds in rounds[-1].items()), flush=True)
    found = ratios(rounds, BASE)
    for case in CASES:
        of = {kind: found[case][kind]["median"] for kind in ("median", "sum")}
        verdict = "" if case == BASE else f"  {'holds' if min(of.values()) >= GOAL else 'DOES NOT HOLD'}: {GOAL}"
        print(f"{case:18} of medians {of['median']:.3f}, of sums {of['sum']:.3f}{verdict}")
    if own.output is not None:
        told = {"machine": machine, "flags": [*MODEL, *flags], "goal": GOAL, "ratios": found, "seconds": rounds}
        own.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
