"""Compares the training overhead of sparse checkpoints with other ways of saving: MoEvement's Table 3, section 3.2.

    python benchmarks/sparse_overhead.py --output docs/results/sparse_overhead_cpu.json

The training program trains one model in bf16 with fp32 masters (12 bytes per parameter in full, 2 as compute weights).
All variants run in turns of a few seconds (``benchmarks/live/slices.py``):

* no saving;
* sparse checkpoints in every iteration, with an automatic window, and with one of 3 iterations, in memory or, with
  --sparse-tier disk, on disk;
* everything in every iteration, in memory (Gemini's interval);
* a third of the operators in full in every iteration, and the gradients of all others, in memory;
* PEC with one expert of each layer in every iteration, in memory (MoC-System);
* everything on disk, at the interval that costs 3 % (CheckFreq).

The program compares mean and median iterations of the same round, after a variant's iterations of measuring and
choosing.  For each iteration of a variant it reports the bytes copied, the bytes written to storage, and how
long training waited.  Jobs differ in speed whatever they save.  Sparse checkpoints are therefore judged by jobs that
save in every second block of 9 iterations, each block compared with its two neighbours (``benchmarks/live/blocks.py``).

Copies, hashes and writes run in the background: overhead is not judged in layouts that leave no core for them.

``--precision fp32`` is for processors without instructions for bf16, where an iteration takes six times as long.

Other flags are passed to the program.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, write_json
from benchmarks.live.blocks import Blocks, between
from benchmarks.live.itself import beside_itself, seconds_of
from benchmarks.live.job import KIND, PP2_EP2, PROGRAM, Job, torchrun
from benchmarks.live.slices import ratios, slices, warm_up
from moc.policy.interval import BLOCK, PROFILE_BLOCKS, SNAPSHOTS, WARM_UP

SIZES = """--bf16 --hidden-size 256 --ffn-hidden-size 256 --num-experts 16 --moe-ffn-hidden-size 128 --seq-length 128
    --max-position-embeddings 128 --vocab-size 1023 --use-distributed-optimizer --micro-batch-size 2
    --global-batch-size 8 --lr 1e-3 --train-iters 100000""".split()
MODEL = [*KIND, *SIZES]
"""Model with many small experts, so that operators have similar sizes, as section 3.2 assumes."""
PRECISIONS = ("bf16", "fp32")

LAYOUTS = {"1": (1, []), "PP2xEP2": (4, PP2_EP2)}  # workers, flags
_MEASURES = WARM_UP + BLOCK  # iterations before a variant that measures takes its first snapshot
_CHOOSES = WARM_UP + (PROFILE_BLOCKS + SNAPSHOTS) * BLOCK


@dataclass(frozen=True)
class Way:
    """One way of saving."""

    flags: str = ""  # flags of the program
    warm_up: int = 8  # minimum number of iterations until it reaches its steady state


BASE, AUTO, THREE, GEMINI = "no saving", "sparse, auto", "sparse, W = 3", "full, interval 1 (Gemini)"
GRADIENT, PEC, CHECKFREQ = "gradient, W = 3", "pec, K = 1, interval 1", "full, auto (CheckFreq)"
WAYS = {
    BASE: Way(),
    AUTO: Way("--ckpt-policy sparse --sparse-window auto", _MEASURES + 8),
    THREE: Way("--ckpt-policy sparse --sparse-window 3"),
    GEMINI: Way("--ckpt-policy full --snapshot-interval 1 --ckpt-tier memory"),
    GRADIENT: Way("--ckpt-policy gradient --gradient-window 3 --ckpt-tier memory"),
    PEC: Way("--ckpt-policy pec --pec-k 1 --snapshot-interval 1 --ckpt-tier memory"),
    CHECKFREQ: Way("--ckpt-policy full --snapshot-interval auto --ckpt-tier disk", _CHOOSES + 6),
}
SMALLER, OVERHEAD = 0.55, 0.02  # goals
BLOCK_ITERATIONS = 9  # three windows of 3 iterations


def measure(ways: Sequence[str], layout: str, own: argparse.Namespace, flags: Sequence[str]) -> list[dict[str, dict]]:
    """Starts a job for each variant, runs them in turns, and returns the :func:`figures` of each round and variant."""
    with ExitStack() as stack:
        jobs, rounds = {}, []
        for way in ways:
            files = stack.enter_context(TemporaryDirectory(prefix="overhead-"))
            started = command(way, layout, own, flags)
            jobs[way] = stack.enter_context(Job(started, files, saves=bool(WAYS[way].flags)))
            warm_up(jobs[way], WAYS[way].warm_up)
        for turns in slices(jobs, own.rounds, own.seconds):
            rounds.append({way: {event["iteration"] for event in turn} for way, turn in turns.items()})
            print(f"{layout}: round {len(rounds)} of {own.rounds}", file=sys.stderr, flush=True)
        # events of these snapshots may follow later
        return [{way: figures(jobs[way].events.all(), counted) for way, counted in one.items()} for one in rounds]


def in_blocks(way: str, layout: str, own: argparse.Namespace, flags: Sequence[str]) -> list[float]:
    """Runs a job that saves in every second block of iterations; returns its :meth:`Blocks.overheads`."""
    blocks = Blocks(WAYS[way].warm_up + 2 * BLOCK_ITERATIONS, BLOCK_ITERATIONS)
    started = partial(command, way, layout, own, flags)
    return blocks.overheads(seconds_of(beside_itself(started, blocks, own.blocks, f"{layout}, {way}")))


def command(way: str, layout: str, own: argparse.Namespace, flags: Sequence[str], program: str = PROGRAM) -> list[str]:
    """Returns the command line of a variant's job."""
    workers, parallel = LAYOUTS[layout]
    saving = WAYS[way].flags.split()
    saving += ["--ckpt-tier", own.sparse_tier] if "sparse" in saving else []
    return [*torchrun(workers), program, *model(own.precision), *parallel, *flags, *saving]


def model(precision: str) -> list[str]:
    """Returns the model's flags with a precision of :data:`PRECISIONS`."""
    return [flag for flag in MODEL if flag != "--bf16" or precision == "bf16"]


def figures(events: Sequence[Mapping], counted: Collection[int]) -> dict:
    """Returns the figures of some iterations of a run.

    Returns:
        ``seconds`` of each iteration; ``snapshots``, bytes of each snapshot taken in them; and means per iteration:
        ``copied`` and ``written`` bytes, a worker's seconds of waiting (``waited``), and seconds of ``copying``
        and ``hashing`` in the background.
    """
    of = {
        kind: [e for e in events if e["type"] == kind and e["iteration"] in counted]
        for kind in ("iteration", "snapshot", "persist", "stall")
    }

    def share(kind: str, what: str) -> float:
        return sum(event[what] for event in of[kind]) / len(counted)

    return {
        "seconds": [event["elapsed_s"] for event in of["iteration"]],
        "snapshots": [event["bytes"] for event in of["snapshot"]],
        "copied": share("snapshot", "bytes"),
        "written": share("persist", "bytes"),
        "waited": share("stall", "seconds"),
        "copying": share("snapshot", "copy_s"),
        "hashing": share("snapshot", "hash_s"),
    }


def summary(rounds: Sequence[Mapping[str, Mapping]]) -> dict[str, dict]:
    """Returns the summary of each variant.

    Returns:
        ``overhead`` (of ``mean`` and ``median`` iteration: the median of rounds, and each round), ``iteration_s``
        (median), ``largest`` snapshot, snapshots per iteration, and the means of :func:`figures`.
    """
    found = ratios([{way: told["seconds"] for way, told in one.items()} for one in rounds], BASE)
    return {way: _of_way([one[way] for one in rounds], found[way]) for way in rounds[0]}


def _of_way(runs: Sequence[Mapping], found: Mapping[str, Mapping]) -> dict:
    means = {what: mean(run[what] for run in runs) for what in ("copied", "written", "waited", "copying", "hashing")}
    return means | {
        "iteration_s": median(seconds for run in runs for seconds in run["seconds"]),
        "snapshots": mean(len(run["snapshots"]) / len(run["seconds"]) for run in runs),
        "largest": max((size for run in runs for size in run["snapshots"]), default=0),
        "overhead": {
            kind: {"median": 1 / of["median"] - 1, "rounds": [1 / ratio - 1 for ratio in of["rounds"]]}
            for kind, of in found.items()
        },
    }


def verdicts(told: Mapping[str, Mapping], core_left: bool) -> dict[str, bool]:
    """Returns each goal of the executed variants with whether it is met; overhead only if a core is free.

    ``told`` is the result of :func:`summary`, with the result of :func:`in_blocks` as ``blocks`` where it was measured.
    """
    found = {}
    if THREE in told and GEMINI in told:
        smaller = 1 - told[THREE]["largest"] / told[GEMINI]["largest"]
        found[f"the largest of a window's 3 snapshots is {smaller:.1%} smaller (>= {SMALLER:.0%})"] = smaller >= SMALLER
    for way in (AUTO, THREE):
        if core_left and way in told:
            overhead = median(told[way].get("blocks") or told[way]["overhead"]["mean"]["rounds"])
            found[f"{way}: iterations take {overhead:+.1%} (<= {OVERHEAD:.0%})"] = overhead <= OVERHEAD
    return found


def table(told: Mapping[str, Mapping]) -> list[str]:
    """Returns a line for each variant: ms and MB per iteration."""
    lines = [f"{'':26}{'ms':>7}{'mean':>8}{'median':>8}{'waits':>7}{'MB copied':>11}{'written':>9}{'largest':>9}"]
    for way, of in told.items():
        overhead = [f"{of['overhead'][kind]['median']:+8.1%}" for kind in ("mean", "median")]
        sizes = [f"{of[what] / 1e6:{width}.1f}" for what, width in (("copied", 11), ("written", 9), ("largest", 9))]
        waits = f"{of['waited'] * 1e3:7.1f}"
        if "blocks" in of:
            low, high = between(of["blocks"])
            sizes.append(f"   in blocks {median(of['blocks']):+.1%} (95 %: {low:+.1%} to {high:+.1%})")
        lines.append("".join([f"{way:26}{of['iteration_s'] * 1e3:7.0f}", *overhead, waits, *sizes]))
    return lines


def main() -> int:
    """Runs all rounds of all layouts, prints and writes the results; returns 1 if a goal is missed."""
    own, flags = parse()
    here, layouts, held = machine(load=True), {}, True
    ways = [BASE, *(way for way in WAYS if way in own.ways and way != BASE)]
    for layout in own.layouts:
        rounds = measure(ways, layout, own, flags)
        told = summary(rounds)
        for way in ways if own.blocks else ():
            if way in (AUTO, THREE, GEMINI, GRADIENT, PEC):  # CheckFreq chooses its interval itself
                told[way]["blocks"] = in_blocks(way, layout, own, flags)
        found = verdicts(told, core_left=LAYOUTS[layout][0] < os.cpu_count())
        print("\n".join([f"{layout}, {LAYOUTS[layout][0]} workers", *table(told)]))
        held &= say(found)
        layouts[layout] = {"ways": told, "verdicts": found, "rounds": rounds}
    described = {
        "machine": here,
        "flags": [*model(own.precision), *flags],
        "ways": {way: WAYS[way].flags for way in ways},
    }
    described |= {"sparse_tier": own.sparse_tier, "seconds": own.seconds, "layouts": layouts}
    write_json(own.output, described)
    return int(not held)


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Parses the benchmark's flags; returns them, and the program's."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=24, help="of a turn for each way (default: 24)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn (default: 4)")
    parser.add_argument("--blocks", type=int, default=60, help="that save, in each job that is compared with itself")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["1"], help="default: 1")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="default: bf16")
    sparse_tier = {"choices": ("memory", "disk"), "default": "memory"}
    parser.add_argument("--sparse-tier", **sparse_tier, help="of sparse checkpoints (default: memory)")
    return parser.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
