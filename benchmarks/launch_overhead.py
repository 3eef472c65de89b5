"""What our launcher and snapshots cost when nothing fails: the same program, with them and under torchrun without.

    python benchmarks/launch_overhead.py --output docs/results/launch_overhead_cpu.json

Three jobs: *torchrun* with no policy at all; our launcher with snapshots of everything in memory at each iteration
(*ours, interval 1*); and at a long interval (*ours, interval 50*).  They run by turns of a few seconds
(``benchmarks/live/slices.py``).  Compared are the iterations of the same round: their median, and their mean, which
also has what few iterations pay.  A ratio of 0.98 says 98 % of torchrun's throughput.  ``--beside`` names another
checkout, whose launcher and program run as *beside, interval 1*, too.

Flags that are not the benchmark's own are the program's: ``--global-batch-size 64`` makes iterations four times as
long, and snapshots as large as before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.live.job import ROOT, Job, launcher, torchrun
from benchmarks.live.slices import ratios, slices, warm_up

MODEL = """--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256 --num-experts 8
    --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall
    --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --transformer-impl local --use-distributed-optimizer
    --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --train-iters 100000 --eval-iters 0 --num-workers 0
    --pipeline-model-parallel-size 2 --expert-model-parallel-size 2""".split()
WORKERS = 4
BASE = "torchrun"
CASES = {BASE: None, "ours, interval 1": 1, "ours, interval 50": 50}  # name: iterations between snapshots
BESIDE = "beside, interval 1"
GOAL = 0.98


def command(every: int | None, checkout: Path, directory: Path, flags: Sequence[str]) -> list[object]:
    """How a job is started that saves every so many iterations, or never."""
    start = torchrun(WORKERS) if every is None else launcher(WORKERS)
    saving = ["--ckpt-policy", "full", "--ckpt-tier", "memory", "--ckpt-dir", directory / "snapshots"]
    program = [*start, checkout / "pretrain_gpt_moe.py", *MODEL, *flags]
    return program if every is None else [*program, *saving, "--snapshot-interval", every]


def measure(own: argparse.Namespace, flags: Sequence[str]) -> Iterator[dict[str, list[float]]]:
    """Starts all jobs, one after the other, and tells what each round took."""
    beside: Path | None = own.beside
    with ExitStack() as stack:
        jobs = {}
        for case, every in (CASES | ({} if beside is None else {BESIDE: 1})).items():
            checkout = beside.absolute() if beside is not None and case == BESIDE else ROOT
            directory = Path(stack.enter_context(TemporaryDirectory(prefix="overhead-")))
            memory = None if every is None else Path("/dev/shm") / directory.name
            started, own_path = command(every, checkout, directory, flags), {"PYTHONPATH": str(checkout)}
            jobs[case] = stack.enter_context(Job(started, directory, memory, environment=own_path))
            warm_up(jobs[case], own.warm_up)
        for told in slices(jobs, own.rounds, own.seconds):
            yield {case: [event["elapsed_s"] for event in events] for case, events in told.items()}


def main() -> None:
    """Runs all rounds, and writes what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="of a turn for each case (default: 30)")
    parser.add_argument("--warm-up", type=int, default=20, help="iterations that do not count (default: 20)")
    parser.add_argument("--seconds", type=float, default=7.0, help="of a turn, at most 10 (default: 7)")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout")
    parser.add_argument("--output", type=Path, help="JSON file")
    own, flags = parser.parse_known_args()
    machine = {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    machine["load_before"], rounds = os.getloadavg()[0], []
    for told in measure(own, flags):
        rounds.append(told)
        print("  ".join(f"{case} {median(seconds):.4f}" for case, seconds in told.items()), flush=True)
    found = ratios(rounds, BASE)
    for case in found:
        of = {kind: found[case][kind]["median"] for kind in ("median", "mean")}
        verdict = "" if case == BASE else f"  {'holds' if min(of.values()) >= GOAL else 'DOES NOT HOLD'}: {GOAL}"
        print(f"{case:18} of medians {of['median']:.3f}, of means {of['mean']:.3f}{verdict}")
    if own.output is not None:
        told = {"machine": machine, "flags": [*MODEL, *flags], "goal": GOAL, "ratios": found, "seconds": rounds}
        own.output.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
