"""Measures the overhead of our launcher and snapshots without failures, compared with the same program under torchrun.

    python benchmarks/launch_overhead.py --output docs/results/launch_overhead_cpu.json

There are three jobs: *torchrun* without a policy, and our launcher with snapshots of the full state in memory, at each
iteration (*ours, interval 1*) or rarely (*ours, interval 50*).  They take turns of a few seconds
(``benchmarks/live/slices.py``).  The program compares the median iterations of a round, and the means, which include
rare costs.  A ratio of 0.98 is 98 % of torchrun's throughput.  ``--beside`` names another checkout, whose launcher and
program run as *beside, interval 1*.  A job's position changes its speed by percents: positions change from round to
round, and ``--starts`` restarts all jobs several times, each time in another order.

Other flags are passed to the program: ``--global-batch-size 64`` makes iterations four times as long, with snapshots of
the same size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, rotated, write_json
from benchmarks.live.job import IN_MEMORY, KIND, PP2_EP2, ROOT, Job, launcher, torchrun
from benchmarks.live.slices import ratios, slices, warm_up

SIZES = """--hidden-size 128 --ffn-hidden-size 256 --num-experts 8 --seq-length 128 --max-position-embeddings 128
    --vocab-size 1023 --use-distributed-optimizer --micro-batch-size 2 --global-batch-size 16 --lr 1e-3
    --train-iters 100000""".split()
MODEL = [*KIND, *SIZES, *PP2_EP2]
WORKERS = 4
BASE = "torchrun"
CASES = {BASE: None, "ours, interval 1": 1, "ours, interval 50": 50}  # name: iterations between snapshots
BESIDE = "beside, interval 1"
GOAL = 0.98


def measure(own: argparse.Namespace, flags: Sequence[str]) -> Iterator[dict[str, list[float]]]:
    """Starts all jobs in turn, restarts them in other orders, and yields the seconds of each round."""
    cases = CASES | ({} if own.beside is None else {BESIDE: 1})
    for start in range(own.starts):
        order = rotated(list(cases), start)
        yield from _measure({case: cases[case] for case in order}, own.rounds // own.starts, own, flags)


def _measure(
    cases: Mapping[str, int | None], rounds: int, own: argparse.Namespace, flags: Sequence[str]
) -> Iterator[dict[str, list[float]]]:
    with ExitStack() as stack:
        jobs = {}
        for case, every in cases.items():
            checkout = Path(own.beside or "").absolute() if case == BESIDE else ROOT
            start = torchrun(WORKERS) if every is None else launcher(WORKERS)
            saving = [] if every is None else [*IN_MEMORY, "--snapshot-interval", every]
            command = [*start, checkout / "pretrain_gpt_moe.py", *MODEL, *flags, *saving]
            files, where = stack.enter_context(TemporaryDirectory(prefix="overhead-")), {"PYTHONPATH": str(checkout)}
            jobs[case] = stack.enter_context(Job(command, files, every is not None, environment=where))
            warm_up(jobs[case], own.warm_up)
        for told in slices(jobs, rounds, own.seconds):
            yield {case: [event["elapsed_s"] for event in events] for case, events in told.items()}


def main() -> None:
    """Runs all rounds, and writes their durations."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="of a turn for each case (default: 30)")
    parser.add_argument("--warm-up", type=int, default=20, help="iterations that do not count (default: 20)")
    parser.add_argument("--seconds", type=float, default=7.0, help="of a turn, at most 10 (default: 7)")
    parser.add_argument(
        "--starts", type=int, default=1, help="of all jobs, between which rounds are split (default: 1)"
    )
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout")
    own, flags = parser.parse_known_args()
    here, rounds = machine(load=True), []
    for told in measure(own, flags):
        rounds.append(told)
        print("  ".join(f"{case} {median(seconds):.4f}" for case, seconds in told.items()), flush=True)
    found = ratios(rounds, BASE)
    for case in found:
        of = {kind: found[case][kind]["median"] for kind in ("median", "mean")}
        verdict = "" if case == BASE else f"  {'holds' if min(of.values()) >= GOAL else 'DOES NOT HOLD'}: {GOAL}"
        print(f"{case:18} of medians {of['median']:.3f}, of means {of['mean']:.3f}{verdict}")
    told = {"machine": here, "flags": [*MODEL, *flags], "goal": GOAL, "ratios": found, "seconds": rounds}
    write_json(own.output, told)


if __name__ == "__main__":
    main()
