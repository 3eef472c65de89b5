"""Measures the training overhead of selective checkpoints, and compares their bytes with MoEtion's equation 5.

    python benchmarks/selective_overhead.py --output docs/results/selective_overhead_cpu.json

The training program trains the model of ``sparse_overhead.py`` (16 experts in each of 4 layers, bf16 with fp32
masters).  An iteration has eight micro batches of one sequence, as each replica in MoEtion's section 7.1.  One worker
runs one thread, so that one of two cores is free for copies and hashes.  Sequences have 512 tokens; with the paper's
2,048, an iteration would take 15 s here.  Part of a snapshot's cost does not depend on its size, and matters less with
longer iterations: ``--seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 --global-batch-size 16`` shows
this.

Each variant is a separate job, which saves in every second block of iterations.  Each block is compared with its two
neighbours (``benchmarks/live/blocks.py``).  The variants are: a quarter of the experts as state, the same bytes with
gradients instead, and as many experts as measured budgets allow.  Each iteration saves to memory.  Measured:

* the overhead in blocks, all time for planning, copies, hashes and gradients.  Each iteration is measured in units of
  its own second half, after copies and hashes, because the machine's speed varies by a tenth between iterations.  The
  overhead in seconds, which this variation hides, is reported for comparison;
* the training thread's loss by its own clocks, which the machine's speed does not change: its processor time in the
  code of snapshots, and the time when it does not compute, compared with iterations that do not save.  Also, the
  slowdown of a processor by copies and hashes on another one;
* stalls: how long training waits, as a share of the iterations that save;
* bytes: each snapshot compared with equation 5 with 12 bytes, and gradients compared with a third of a state;
* how long a rank takes to choose the experts of a snapshot, of 64 in each of 24 layers.

``--precision fp32`` is for processors without instructions for bf16, where an iteration takes six times as long.

Other flags are passed to the program.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, show, table, write_json
from benchmarks.live.blocks import Blocks, between
from benchmarks.live.itself import beside_itself, seconds_of
from benchmarks.live.job import launcher
from benchmarks.live.sharing import slowed
from benchmarks.overhead.methods import operators_of, parameters
from benchmarks.papers.equations import pec_size
from benchmarks.sparse_overhead import MODEL as SMALL_BATCH
from benchmarks.sparse_overhead import PRECISIONS
from benchmarks.sparse_overhead import model as model_of
from moc.policy import full_plan
from moc.policy.interval import Every
from moc.policy.selective import Selective
from moc.sharding.save_items import StateBytes

MORE = "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --global-batch-size 8".split()
MODEL = [*SMALL_BATCH, *MORE]
SELECTIVE = ["--ckpt-policy", "selective", "--ckpt-tier", "memory", "--snapshot-interval", "1"]
STATES, GRADIENTS, MEASURED = "4 of 16 experts, states", "the same bytes, gradients", "budgets measured, gradients"
WAYS = {
    STATES: ["--selective-experts", "4", "--selective-gradients", "off"],
    GRADIENTS: ["--selective-experts", "4"],
    MEASURED: [],
}
EXPERTS = {STATES: 4}
"""Experts of each layer in each snapshot, where this number is fixed."""
WARM_UP = 30  # iterations until budgets are measured, and the first snapshot's cost is known
LENGTH = 9  # iterations of a block
SNAPSHOT = 40_000_000  # approximate bytes
OVERHEAD, STALLS, BYTES, THIRD = 0.02, 0.01, 0.01, 0.02  # goals


def figures(events: Sequence[Mapping], blocks: Blocks) -> dict:
    """Returns the figures of a job that saves in blocks.

    Returns:
        ``overheads`` of each block in seconds; ``paced``, in units of iterations' own second halves; ``beside_s``, the
        time of other threads during these halves, in iterations that save and in others; ``lost``, the share lost by
        the training thread, by block; ``stalls``, the share of time that training waits in saving iterations; for each
        snapshot in blocks its ``bytes``, the ``experts`` of each layer in it, and how many of them are ``chained``, as
        gradients; ``iteration_s``, the median of iterations that do not save.
    """
    seconds = seconds_of(events)
    saving = {iteration for iteration in seconds if blocks.number(iteration) >= 0 and blocks.saves(iteration)}
    waited = sum(e["seconds"] for e in events if e["type"] == "stall" and e["iteration"] in saving)
    held = {e["iteration"]: e for e in events if e["type"] == "iteration" and "selective_experts" in e}
    snapshots = [e for e in events if e["type"] == "snapshot" and e["iteration"] in saving & held.keys()]
    clocks = {e["iteration"]: e for e in events if e["type"] == "clocks"}
    lost = blocks.compared({iteration: e["code_s"] + e["away_s"] for iteration, e in clocks.items()})
    paced = blocks.overheads({iteration: e["wall_s"] / e["half_s"] for iteration, e in clocks.items()})
    others = blocks.compared({iteration: e["beside_s"] for iteration, e in clocks.items()})
    beside = [without for _, without in blocks.compared({i: e["wall_s"] for i, e in clocks.items()})]
    return {
        "overheads": blocks.overheads(seconds),
        "paced": paced,
        "beside_s": [fmean(both) for both in zip(*others, strict=True)],
        "lost": [(saving - without) / wall for (saving, without), wall in zip(lost, beside, strict=True)],
        "stalls": waited / sum(seconds[iteration] for iteration in saving),
        "bytes": [e["bytes"] for e in snapshots],
        "experts": [held[e["iteration"]]["selective_experts"] for e in snapshots],
        "chained": [held[e["iteration"]].get("selective_gradients", 0.0) for e in snapshots],
        "iteration_s": median(took for iteration, took in seconds.items() if not blocks.saves(iteration)),
    }


def by_equation(experts: float, chained: float, counts: Mapping[str, int]) -> tuple[float, float]:
    """Returns the bytes of a snapshot's states by equation 5 with 12 bytes, and of its chained experts as states.

    Args:
        experts: mean number of experts of each layer in it.
        chained: number of these stored as gradients.
        counts: result of :func:`benchmarks.overhead.methods.parameters`.
    """
    state, number = StateBytes(weights=0), counts["num_experts"]  # Format v1 has masters and moments
    size = partial(pec_size, experts=counts["experts"], num_experts=number, state=state)
    return size(others=counts["others"], k=experts - chained), size(others=0, k=chained)


def judged(told: Mapping, experts: int | None, counts: Mapping[str, int]) -> dict:
    """Returns the deviation of bytes from equation 5.

    Returns:
        ``bytes_error``, the largest relative error of snapshots that have only states; ``gradient``, the bytes of
        gradients divided by the bytes of the states they replace, over all snapshots.  Headers, as measured on
        snapshots of states, are subtracted.  A value is None if there are no such snapshots.
    """
    beyond, errors, gradients, in_place = [], [], [], 0.0
    for amount, number, chained in zip(told["bytes"], told["experts"], told["chained"], strict=True):
        states, chains = by_equation(number if experts is None else experts, chained, counts)
        if chained:
            gradients.append(amount - states)
            in_place += chains
        else:
            beyond.append(amount - states)
            errors.append(abs(amount / states - 1))
    headers = median(beyond) if beyond else 0.0
    part = (sum(gradients) - headers * len(gradients)) / in_place if gradients else None
    return {"bytes_error": max(errors, default=None), "gradient": part}


def planning_s(layers: int = 24, experts: int = 64, snapshots: int = 20) -> float:
    """Returns the median time to choose a quarter of the experts for a snapshot, from drifting loads."""
    model = [*MODEL, "--num-layers", str(layers), "--num-experts", str(experts)]
    policy, chance, took = Selective(operators_of(model), Every(1), experts=experts // 4), random.Random(0), []
    load = {layer: [0] * experts for layer in range(layers)}
    policy.on_snapshot(full_plan(policy, 1), load)
    for iteration in range(2, snapshots + 2):
        load = {layer: [tokens + int(100 * chance.paretovariate(1)) for tokens in row] for layer, row in load.items()}
        begun = time.perf_counter()
        plan = policy.plan(iteration, load)
        took.append(time.perf_counter() - begun)
        if plan is not None:
            policy.on_snapshot(plan, load)
    return median(took)


def verdicts(name: str, found: Mapping, core_left: bool) -> dict[str, bool]:
    """Returns each goal of a variant with whether it is met; times only if a core is free."""
    held = {}
    if core_left:
        longer, (_, most), lost = median(found["paced"]), between(found["paced"]), fmean(found["lost"])
        held[f"{name}: {longer:+.1%} in blocks, at most {most:+.1%} (<= {OVERHEAD:.0%})"] = most <= OVERHEAD
        held[f"{name}: {lost:.2%} lost by the thread's clocks (<= {OVERHEAD:.0%})"] = lost <= OVERHEAD
        held[f"{name}: stalls {found['stalls']:.2%} (<= {STALLS:.0%})"] = found["stalls"] <= STALLS
    if (error := found["bytes_error"]) is not None:
        held[f"{name}: bytes within {error:.2%} of equation 5 (<= {BYTES:.0%})"] = error <= BYTES
    if (part := found["gradient"]) is not None:
        held[f"{name}: gradients {3 * part:.3f} of a third of a state (within {THIRD:.0%})"] = (
            abs(3 * part - 1) <= THIRD
        )
    return held


def row(name: str, found: Mapping) -> list[str]:
    """Returns a line of the table."""
    paced, seconds = (
        f"{median(shares):+.1%} ({low:+.1%} to {high:+.1%})"
        for shares in (found["paced"], found["overheads"])
        for low, high in [between(shares)]
    )
    experts, chained = (median(found[what]) for what in ("experts", "chained"))
    size = f"{median(found['bytes']) / 1e6:.1f}"
    iteration = f"{1e3 * found['iteration_s']:.0f}"
    lost = f"{fmean(found['lost']):.2%}"
    return [name, iteration, paced, seconds, lost, f"{found['stalls']:.2%}", f"{experts:g}", f"{chained:g}", size]


def main() -> int:
    """Runs all jobs, prints and writes the results; returns 1 if a goal is missed."""
    parser = command_line(__doc__)
    parser.add_argument("--blocks", type=int, default=24, help="that save, in each job (default: 24)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16", help="default: bf16")
    own, flags = parser.parse_known_args()
    model = [*model_of(own.precision), *MORE]
    here, counts, ways, held = machine(load=True), parameters([*model, *flags]), {}, True
    blocks = Blocks(WARM_UP + 2 * LENGTH, LENGTH)
    for name in own.ways:
        saving = [*SELECTIVE, *WAYS[name]]
        events = beside_itself(lambda p, s=saving: [*launcher(1), p, *model, *flags, *s], blocks, own.blocks, name)
        ways[name] = (told := figures(events, blocks)) | judged(told, EXPERTS.get(name), counts)
        held &= say(verdicts(name, ways[name], core_left=(os.cpu_count() or 1) > 1))
    columns = ("", "iteration, ms", "in blocks", "in seconds", "by clocks", "stalls", "experts", "as gradients", "MB")
    show(140, [(table("Selective checkpoints", columns, (row(*one) for one in ways.items())), ())])
    described = {"machine": here, "flags": [*model, *flags], "parameters": counts, "blocks": vars(blocks)}
    described |= {"planning_s": planning_s(), "slowed": slowed(SNAPSHOT)}
    print(
        "slowdown of a matrix product by "
        + ", ".join(f"{what}: {share:+.1%}" for what, share in described["slowed"].items())
    )
    print(f"choosing the experts of a snapshot: {1e3 * described['planning_s']:.1f} ms")
    write_json(own.output, described | {"saving": {name: WAYS[name] for name in ways}, "ways": ways})
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
