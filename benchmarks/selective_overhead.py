"""Measures what checkpoints cost training behind slow links: MoEtion's Figures 5, 6 and 7.

    python benchmarks/selective_overhead.py --output docs/results/selective_overhead_cpu.json

At each of five bandwidths, jobs train the same model (``benchmarks/live/slow_link.py``: the device computes without
the processor, and all copies to host memory really take their time):

* ``selective`` with its defaults, which measures its budgets;
* ``full`` in every iteration, in memory (Gemini);
* ``full`` at the interval that ``auto`` measures, on disk (CheckFreq).

``selective`` runs at the same time as a job that does not save, because the machine's speed varies, and the others
together afterwards.  No bandwidth is sufficient for a full snapshot in every
iteration.  Reported, in medians of the last iterations by the training thread's clock:

* the iteration, relative to the same iterations of the job that does not save;
* stalls, as a share of the iteration;
* checkpoints in 100 iterations, their bytes, and the share of them with gradients;
* tokens at risk right after a snapshot, in iterations;
* wasted time per failure: copy and hash of a checkpoint, its retrieval after a kill, and half the iterations between
  checkpoints (section 7.2).

Goals: an iteration of ``selective`` is at most 3 % longer, with gradients in at least 90 % of its snapshots; where
``full`` waits for more than 30 %, ``selective`` waits for at most 1 %.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, show, table, write_json
from benchmarks.live.itself import seconds_of
from benchmarks.live.job import KIND, ROOT, Job, launcher
from moc.policy.interval import BLOCK, PROFILE_BLOCKS, SNAPSHOTS, WARM_UP

MODEL = (
    [*KIND, "--num-layers", "2", "--moe-router-load-balancing-type", "none"]
    + """--hidden-size 64
    --ffn-hidden-size 384 --num-experts 16 --seq-length 32 --max-position-embeddings 32 --vocab-size 255
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --train-iters 100000""".split()
)
RATES = (5.0, 7.5, 10.0, 15.0, 20.0)
"""Bandwidths in MB/s; a full snapshot has 30 MB, which takes 1.5 to 6 times the seconds of forward and backward."""
NONE, SELECTIVE, GEMINI, CHECKFREQ = (
    "no saving",
    "selective",
    "full, every iteration (Gemini)",
    "full, auto (CheckFreq)",
)
WAYS = {
    NONE: "",
    SELECTIVE: "--ckpt-policy selective --ckpt-tier memory --persist-interval 100000",
    GEMINI: "--ckpt-policy full --snapshot-interval 1 --ckpt-tier memory --persist-interval 100000",
    CHECKFREQ: "--ckpt-policy full --snapshot-interval auto --ckpt-tier disk",
}
FIRST = {
    SELECTIVE: WARM_UP + BLOCK + 8,
    GEMINI: WARM_UP,
    CHECKFREQ: WARM_UP + (PROFILE_BLOCKS + SNAPSHOTS) * BLOCK,
}
"""Iterations until each way reaches its steady state."""
LENGTHS = {SELECTIVE: 40, GEMINI: 8, CHECKFREQ: 20}
"""Iterations that count; a slow link makes Gemini's iterations up to 6 times longer."""
LONGER, STALL, GRADIENTS, BLOCKED = 0.03, 0.01, 0.9, 0.3  # goals


def undisturbed_s(events: Sequence[Mapping], first: int) -> float:
    """Returns the median seconds of a job's iterations from ``first`` on."""
    return median(took for iteration, took in seconds_of(events).items() if iteration >= first)


def figures(events: Sequence[Mapping], first: int, before_s: float) -> dict[str, float]:
    """Returns the figures of a job from its events.

    Args:
        events: of one run of the job.
        first: first iteration that counts.
        before_s: seconds of an iteration without saving.
    """
    seconds = seconds_of(events)
    snapshots = [event for event in events if event["type"] == "snapshot"]
    stalls: Counter[int] = Counter()
    for event in events:
        if event["type"] == "stall":
            stalls[event["iteration"]] += event["seconds"]
    counted = [iteration for iteration in seconds if iteration >= first]
    saved = [event for event in snapshots if event["iteration"] >= first]
    held = {event["iteration"]: event for event in events if event["type"] == "iteration"}
    apart = [event["snapshot_interval"] for event in events if event["type"] == "choice"]
    chained = [
        held[event["iteration"]].get("selective_gradients", 0.0) > 0 for event in saved if event["iteration"] in held
    ]
    took, total_s = median(seconds[i] for i in counted), sum(seconds[i] for i in counted)
    return {
        "before_s": before_s,
        "iteration_s": took,
        "longer": took / before_s - 1,
        "mean_longer": total_s / len(counted) / before_s - 1,
        "stall": median(stalls[iteration] for iteration in counted) / took,
        "mean_stall": sum(stalls[iteration] for iteration in counted)
        / sum(seconds[iteration] for iteration in counted),
        "snapshots": len(saved) / len(counted),
        "between": apart[-1] if apart else len(counted) / max(1, len(saved)),
        "bytes": median(event["bytes"] for event in saved or snapshots),
        "copy_s": median(event["copy_s"] + event["hash_s"] for event in saved or snapshots),
        "gradients": fmean(chained) if chained else 0.0,
        "experts": median(held[iteration].get("selective_experts", 0.0) for iteration in counted),
        "mlt": fmean(held[iteration].get("mlt", 0.0) for iteration in counted),
    }


def wasted_s(found: Mapping[str, float], retrieval_s: float) -> float:
    """Returns the time that a failure wastes (section 7.2): save, retrieval, and half the time between checkpoints."""
    return found["copy_s"] + retrieval_s + found["between"] / 2 * found["iteration_s"]


def lose_worker(job: Job) -> tuple[float, float]:
    """Kills the worker; returns the seconds to load its state, and the lost tokens in iterations."""
    os.kill(job.workers()[0], signal.SIGKILL)
    loaded = job.wait_for(lambda: job.events.of("resume"), "a recovery")[-1]
    job.reach(job.iteration + 1)
    lost = job.events.of("lost")
    return loaded["seconds"], lost[-1]["raised_by"] * loaded["iteration"] if lost else 0.0


TOGETHER = ((NONE, SELECTIVE), (GEMINI, CHECKFREQ))
"""Jobs that run at the same time, and wait for one another."""


def compared(rate: float, device_s: float) -> dict[str, dict[str, float]]:
    """Runs a job of each way behind a link of ``rate`` MB/s; returns the figures of each way that saves."""
    environment = {"DEVICE_TIME_S": str(device_s), "LINK_RATE": str(1e6 * rate)}
    found: dict[str, dict[str, float]] = {}
    before_s = 0.0
    for ways in TOGETHER:
        with ExitStack() as stack:
            jobs: dict[str, Job] = {}
            for way in ways:
                files = stack.enter_context(TemporaryDirectory(prefix="overhead-"))
                command = [*launcher(1), ROOT / "benchmarks/live/slow_link.py", *MODEL, *WAYS[way].split()]
                jobs[way] = stack.enter_context(Job(command, files, bool(WAYS[way]), environment=environment))
            for way, job in jobs.items():
                if way == NONE:
                    last = FIRST[SELECTIVE] + LENGTHS[SELECTIVE]
                    job.reach(last)
                    before_s = undisturbed_s(job.events.all(), FIRST[SELECTIVE])
                    continue
                last = FIRST[way] + LENGTHS[way]
                job.reach(last)
                events = [event for event in job.events.all() if (event.get("iteration") or 0) <= last]
                found[way] = figures(events, FIRST[way], before_s)
                retrieval_s, lost = lose_worker(job)
                found[way] |= {"retrieval_s": retrieval_s, "lost": lost, "wasted_s": wasted_s(found[way], retrieval_s)}
    return found


def verdicts(rate: float, found: Mapping[str, Mapping[str, float]]) -> dict[str, bool]:
    """Returns each goal at a bandwidth with whether it is met."""
    own, blocked = found[SELECTIVE], found[GEMINI]["mean_stall"] > BLOCKED
    held = {
        f"{rate:g} MB/s: an iteration is {own['longer']:+.1%} longer (<= {LONGER:.0%})": own["longer"] <= LONGER,
        f"{rate:g} MB/s: {own['gradients']:.0%} of snapshots have gradients (>= {GRADIENTS:.0%})": own["gradients"]
        >= GRADIENTS,
    }
    if blocked:
        held[f"{rate:g} MB/s: stalls {own['stall']:.2%} (<= {STALL:.0%})"] = own["stall"] <= STALL
    return held


def row(rate: float, way: str, found: Mapping[str, float]) -> list[str]:
    """Returns a line of the table."""
    return [
        f"{rate:g} MB/s, {way}",
        f"{found['iteration_s']:.2f}",
        f"{found['longer']:+.1%} ({found['mean_longer']:+.1%})",
        f"{found['stall']:.1%} ({found['mean_stall']:.1%})",
        f"{100 / found['between']:.0f}",
        f"{found['bytes'] / 1e6:.1f}",
        f"{found['gradients']:.0%}",
        f"{found['mlt']:.2f}",
        f"{found.get('wasted_s', 0.0):.1f}",
    ]


COLUMNS = (
    *("", "iteration, s", "longer (mean)", "stall (mean)", "per 100 iterations", "MB", "with gradients"),
    *("tokens at risk", "wasted, s"),
)


def main() -> int:
    """Runs all jobs, prints and writes the results; returns 1 if a goal is missed."""
    parser = command_line(__doc__)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES, metavar="MB/S", help="bandwidths")
    parser.add_argument("--device-s", type=float, default=0.25, help="seconds of a micro batch (default: 0.25)")
    own = parser.parse_args()
    here, rates, held, rows = machine(load=True), {}, True, []
    for rate in own.rates:
        rates[str(rate)] = compared(rate, own.device_s)
        rows += [row(rate, way, found) for way, found in rates[str(rate)].items()]
        held &= say(verdicts(rate, rates[str(rate)]))
        print(f"load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    show(160, [(table("Checkpoints behind slow links", COLUMNS, rows), ())])
    write_json(own.output, {"machine": here, "flags": MODEL, "ways": WAYS, "rates": rates})
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
