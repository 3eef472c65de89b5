"""Compares a pipeline's bubbles, and the copies in them, with MoEtion's formulas (section 5.3, Algorithm 4).

    python benchmarks/selective_bubbles.py --output docs/results/selective_bubbles_cpu.json

The training program trains a tiny model on four pipeline stages with a selective snapshot in each iteration and
``--selective-hide bubble``.  Forwards and backwards of a micro batch are slowed down to make the schedule visible.
Copies are slowed down so that a rank's snapshot takes 0.5, 1, 2 or 3 times the bubbles of an iteration.  Each rank
reports

* the measured bubble, and ``(PP - 1) (t_f + t_b) / v`` with the measured times of a micro batch;
* the share of bytes copied while the gate was open, and during waits, and ``min(1, t_bubble / t_ss)``.  The gate is
  also open between iterations, while gradients are reduced, and when the update is due.

Other flags are passed to the program.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.live.job import KIND, ROOT, SHARED
from benchmarks.save_peers.trainer import begin
from moc.snapshot.device_copy import Gate

STAGES, MICRO_BATCHES = 4, 8
SCHEDULES = {"1F1B": 1, "interleaved": 2}  # chunks per stage
RATIOS = (0.5, 1.0, 2.0, 3.0)  # t_ss divided by t_bubble; the copy is shorter than the iteration
WARM_UP = 6  # iterations that do not count: the first snapshot is full, and the rate is unknown
LENGTH, SHARE = 0.2, 0.9  # goals
MODEL = [
    *KIND,
    *"""--hidden-size 128 --ffn-hidden-size 256 --num-experts 8 --seq-length 32 --max-position-embeddings 32
    --vocab-size 255 --use-distributed-optimizer --micro-batch-size 1 --lr 1e-3 --train-iters 100000
    --ckpt-policy selective --selective-experts 4 --selective-hide bubble --snapshot-interval 1
    --ckpt-tier memory""".split(),
    *("--global-batch-size", str(MICRO_BATCHES), "--pipeline-model-parallel-size", str(STAGES)),
]


class Slow:
    """Slows down this process's micro batches and copies, and records their times; imports megatron-core.

    Args:
        gate: gate of the process's copies.
        forward_s: added to the forward of a micro batch on a stage.
        backward_s: added to its backward.
        chunks: number of a stage's chunks, which share these times.
    """

    def __init__(self, gate: Gate, forward_s: float, backward_s: float, chunks: int):
        from megatron.core.pipeline_parallel import schedules

        from moc.snapshot import device_copy

        self.rate = float("inf")  # bytes per second of copies
        self.told: dict[str, list[float]] = defaultdict(list)
        self._gate, self._open, self._computed_s = gate, 0, 0.0
        schedules.forward_step = self._slow(schedules.forward_step, forward_s / chunks)
        schedules.backward_step = self._slow(schedules.backward_step, backward_s / chunks)
        self._copy, self._passed = device_copy._copy_all, device_copy._passed
        device_copy._copy_all, device_copy._passed = self._slow_copy, self._note_snapshot

    def _slow(self, step, seconds: float):
        def slow(*args, **options):
            begun = time.perf_counter()
            time.sleep(seconds)
            answer = step(*args, **options)
            self._computed_s += time.perf_counter() - begun
            return answer

        return slow

    def _slow_copy(self, copies, non_blocking: bool) -> None:
        amount = sum(copy.source.nbytes for copy in copies)
        self._open += amount if self._gate.is_open else 0
        time.sleep(amount / self.rate)
        self._copy(copies, non_blocking)

    def _note_snapshot(self, copies, *how):
        passed = self._passed(copies, *how)
        self.told["bytes"].append(sum(copy.source.nbytes for copy in copies))
        self.told["copy_s"].append(passed.seconds)
        self.told["in_waits"].append(passed.bubble_bytes / self.told["bytes"][-1])
        self.told["open"].append(self._open / self.told["bytes"][-1])
        self._open = 0
        return passed

    def note_iteration(self, seconds: float, bubble_s: float) -> None:
        """Records the times of an iteration."""
        self.told["iteration_s"].append(seconds)
        self.told["bubble_s"].append(bubble_s)
        self.told["micro_batch_s"].append(self._computed_s / MICRO_BATCHES)
        self._computed_s = 0.0


def work(own: argparse.Namespace, flags: Sequence[str]) -> None:
    """Trains as a worker; rank 0 writes the records of all workers."""
    run, stop, _ = begin(flags)
    bubbles = run.stepper.boundaries.bubbles
    slow = Slow(bubbles, own.forward_s, own.backward_s, SCHEDULES[own.schedule])
    import torch.distributed as dist

    from benchmarks.save_peers.rounds import gather
    from megatron.pretraining.loop import iterate

    for iteration in range(WARM_UP + own.iterations):
        if iteration == 3:  # the sizes of two partial snapshots are known
            slow.rate = slow.told["bytes"][-1] / (own.ratio * median(slow.told["bubble_s"]))
        begun = time.perf_counter()
        iterate(run, stop)
        slow.note_iteration(time.perf_counter() - begun, bubbles._seconds[-1])
    told = gather({name: values[-own.iterations :] for name, values in slow.told.items()})
    if dist.get_rank() == 0:
        write_json(own.output, {"ranks": told})
    dist.barrier()
    run.session.close()
    dist.destroy_process_group()


def case(schedule: str, ratio: float, own: argparse.Namespace, flags: Sequence[str]) -> dict:
    """Runs one case; returns the records of its ranks."""
    chunks = SCHEDULES[schedule]
    layers = ["--num-layers", str(STAGES * chunks)]
    layers += ["--num-virtual-stages-per-pipeline-rank", str(chunks)] if chunks > 1 else []
    with TemporaryDirectory(prefix="bubbles-") as files, TemporaryDirectory(prefix="bubbles-", dir=SHARED) as memory:
        answer = Path(files, "told.json")
        mine = f"--worker --schedule {schedule} --ratio {ratio} --iterations {own.iterations} --output {answer}"
        mine += f" --forward-s {own.forward_s} --backward-s {own.backward_s}"
        places = ["--ckpt-dir", f"{files}/snapshots", "--ckpt-memory-dir", memory]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(STAGES)]
        command = [sys.executable, "-W", "ignore", *launcher, str(ROOT / "benchmarks/selective_bubbles.py")]
        subprocess.run([*command, *mine.split(), *MODEL, *layers, *places, *flags], cwd=ROOT, check=True)
        return json.loads(answer.read_text())


def figures(ranks: Sequence[Mapping[str, Sequence[float]]], chunks: int) -> dict[str, float]:
    """Returns medians over iterations, and means over ranks; ``worst_*`` is the rank that is farthest off.

    Returns:
        ``bubble_s`` as measured, ``formula_s``, and their ratio ``length``; ``ratio``, t_ss divided by ``bubble_s``;
        shares of bytes copied with an open gate (``open``) and during waits (``in_waits``); ``of_fitting``, ``open``
        divided by the share that fits.
    """
    each = []
    for told in ranks:
        one = {name: median(values) for name, values in told.items()}
        formula_s = (STAGES - 1) * one["micro_batch_s"] / chunks
        ratio = one["copy_s"] / one["bubble_s"]
        length = one["bubble_s"] / formula_s
        each.append({**one, "formula_s": formula_s, "length": length, "ratio": ratio})
        each[-1]["of_fitting"] = one["open"] / min(1.0, 1 / ratio)
    found = {name: sum(one[name] for one in each) / len(each) for name in each[0]}
    worst = max((one["length"] for one in each), key=lambda length: abs(length - 1))
    return found | {"worst_length": worst, "worst_of_fitting": min(one["of_fitting"] for one in each)}


def verdicts(cases: Mapping[str, Mapping[str, float]]) -> dict[str, bool]:
    """Returns each goal with whether it is met, by case, for the mean over ranks."""
    return {
        f"{name}: bubbles {found['length']:.2f} of the formula's (within {LENGTH:.0%})": abs(found["length"] - 1)
        <= LENGTH
        for name, found in cases.items()
    } | {
        f"{name}: {found['open']:.0%} copied with an open gate, {found['of_fitting']:.2f} of the limit (>= {SHARE})": (
            found["of_fitting"] >= SHARE
        )
        for name, found in cases.items()
    }


def main() -> None:
    """Measures all cases, prints verdicts, writes JSON; measures one case as a worker."""
    parser = command_line(__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, help="one schedule only (default: both)")
    parser.add_argument("--ratio", type=float, help="t_ss / t_bubble (default: 0.5, 1, 2 and 3)")
    parser.add_argument("--iterations", type=int, default=6, help="iterations that count (default: 6)")
    parser.add_argument("--forward-s", type=float, default=0.06, help="added to a forward (default: 0.06)")
    parser.add_argument("--backward-s", type=float, default=0.12, help="added to a backward (default: 0.12)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    own, flags = parser.parse_known_args()
    if own.worker:
        work(own, flags)
        return
    told, cases = {}, {}
    for schedule in [own.schedule] if own.schedule else SCHEDULES:
        for ratio in [own.ratio] if own.ratio else RATIOS:
            name = f"{schedule}, t_ss = {ratio:g} t_bubble"
            told[name] = case(schedule, ratio, own, flags)
            cases[name] = figures(told[name]["ranks"], SCHEDULES[schedule])
            print(name, json.dumps({key: round(value, 4) for key, value in cases[name].items()}), flush=True)
    say(verdicts(cases))
    write_json(own.output, {"machine": machine(), "flags": flags, "cases": cases, "told": told})


if __name__ == "__main__":
    main()
