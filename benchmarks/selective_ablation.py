"""Measures the bytes sent between nodes with each of MoEtion's techniques, in the order of its Figure 10.

    python benchmarks/selective_ablation.py --output docs/results/selective_ablation_cpu.json

The training program trains a tiny model of 16 experts in each of 4 layers on four nodes of one worker each (PP2 x EP2,
with ZeRO).  Each iteration has a snapshot that is sent to one other node (``--ckpt-tier peers``).  The routers prefer
some experts: 3 of 16 get 80 % of the tokens (``benchmarks/live/uneven.py``).  The techniques are enabled in order:

* everything, as Gemini saves it;
* selective: 4 of 16 experts of each layer, as state;
* + bubbles: copies to host memory run in the pipeline's bubbles;
* + placement, if the program has it: without ZeRO two nodes each hold the same dense state, which is not sent;
* + gradients instead of state.  The budget is 2 states, which has room for the gradients of 4 experts and more, so each
  snapshot must have at least as many experts as before.

The program reports for snapshots in the steady state

* the bytes sent between nodes, and the share of the local copy that runs in bubbles;
* the experts in each copy, and the tokens at risk if a node is lost;
* a node's peak memory for snapshots, and the planner's prediction.

Only bytes are measured, so other load on the machine does not matter.

Other flags are passed to the program.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, say, show, table, write_json
from benchmarks.live.job import KIND, PP2_EP2, ROOT
from benchmarks.live.nodes import bytes_in, job_of_nodes
from benchmarks.overhead.methods import operators_of
from moc.recovery import copy_placement

UNEVEN = str(ROOT / "benchmarks/live/uneven.py")
NODES = 4
MODEL = [
    *KIND,
    *PP2_EP2,
    *"""--hidden-size 64 --ffn-hidden-size 128 --num-experts 16 --seq-length 32 --max-position-embeddings 32
    --vocab-size 255 --micro-batch-size 1 --global-batch-size 16 --lr 1e-9 --train-iters 100000""".split(),
]
PEERS = """--ckpt-tier peers --replicas 1 --snapshot-interval 1 --persist-interval 100000
    --max-snapshot-lag 1""".split()
ZERO = ["--use-distributed-optimizer"]
EVERYTHING, SELECTIVE, BUBBLES = "everything", "selective", "+ bubbles"
PLACEMENT, GRADIENTS = "+ placement", "+ gradients"
_STATES = "--ckpt-policy selective --selective-experts 4 --selective-gradients off"
_HIDDEN = "--selective-hide bubble"
STEPS = {
    EVERYTHING: "--ckpt-policy full",
    SELECTIVE: _STATES,
    BUBBLES: f"{_STATES} {_HIDDEN}",
    PLACEMENT: f"{_STATES} {_HIDDEN}",
    GRADIENTS: f"--ckpt-policy selective --selective-bytes {2 * 4 * 12 * 3 * 64 * 128} {_HIDDEN}",  # of 2 states
}
WARM_UP = 45  # iterations until chains reach their full length, 4 times 16 / 2
FEWER, MEMORY = 2.0, 1.05  # minimum reduction, and maximum ratio to predicted memory


def measure(flags: Sequence[str], iterations: int) -> dict:
    """Trains with one step's flags; measures its snapshots in the steady state.

    Returns:
        Lists by snapshot: ``network``, bytes sent between all nodes; ``bytes`` that ranks copied, and ``in_bubbles`` of
        these.  Where experts are selected: ``copies``, experts of each layer with a copy on other nodes; ``mlt``,
        tokens at risk in copies, in iterations' tokens.  ``memory`` is the peak of all nodes, divided by their number.
    """
    most = 0
    with job_of_nodes(NODES, 1, [UNEVEN, *MODEL, *PEERS, *flags]) as (job, memory):
        for iteration in range(1, WARM_UP + iterations + 2):
            job.reach(iteration)
            most = max(most, bytes_in(memory))
        events = list(job.events.all())
    counted = range(WARM_UP, WARM_UP + iterations)
    of = {
        kind: [e for e in events if e["type"] == kind and e["iteration"] in counted]
        for kind in ("replicate", "snapshot", "iteration")
    }
    selected = [e for e in of["iteration"] if "selective_copies" in e]
    return {
        "network": [e["bytes"] for e in of["replicate"]],
        "bytes": [e["bytes"] for e in of["snapshot"]],
        "in_bubbles": [e.get("bubble_bytes", 0) for e in of["snapshot"]],
        "copies": [e["selective_copies"] for e in selected],
        "mlt": [e["mlt_peers"] for e in selected],
        "memory": most / NODES,
    }


def predicted_memory(flags: Sequence[str]) -> float:
    """Returns the planner's prediction of a node's memory for a step, in bytes: the maximum over nodes."""
    from moc.sharding import ParallelLayout, StateBytes
    from moc.simulate.live_costs import Running, options_of, priced, saved_by_rules

    flags = [flag for flag in flags if flag not in ZERO]
    words = dict(zip(flags[::2], flags[1::2], strict=True))
    state = StateBytes(weights=0)  # Format v1 has masters and moments
    saved = saved_by_rules(operators_of(MODEL), ParallelLayout(NODES, pp=2, ep=2), state, gradients=True)
    copy_rate = write_rate = replicate_rate = 1e12  # irrelevant for memory
    run = Running("peers", NODES, 1, saved, 1.0, 0.9, copy_rate, write_rate, replicate_rate)
    known = ("--selective-experts", "--selective-bytes", "--selective-gradients")
    asked = {flag[2:].replace("-", "_"): words[flag] for flag in known if flag in words}
    found = priced(run, words["--ckpt-policy"], options_of(asked | {"snapshot_interval": "1", "replicas": 1}, 3600.0))
    return found.host_bytes


def steps() -> dict[str, list[str]]:
    """Returns the flags of each step by name, in Figure 10's order; without ZeRO from placement on, if available."""
    placed, found, zero = hasattr(copy_placement, "not_sent"), {}, ZERO
    for name, flags in STEPS.items():
        zero = [] if placed and name == PLACEMENT else zero
        if placed or name != PLACEMENT:
            found[name] = [*zero, *flags.split()]
    return found


def verdicts(told: Mapping[str, Mapping]) -> dict[str, bool]:
    """Returns each goal of the executed steps with whether it is met, in their order."""
    network = {name: fmean(of["network"]) for name, of in told.items()}
    held = {
        f"{name}: {network[name] / network[before]:.2f} of the network bytes of '{before}'": network[name]
        <= 1.001 * network[before]
        for before, name in pairwise(told)
    }
    if SELECTIVE in told and GRADIENTS in told:
        fewer = network[SELECTIVE] / network[GRADIENTS]
        if PLACEMENT in told:
            held[f"all together: {fewer:.2f} times fewer than plain selective (>= {FEWER:g})"] = fewer >= FEWER
        copies = [fmean(told[name]["copies"]) for name in (SELECTIVE, GRADIENTS)]
        held["as many experts in each copy: {:.2f} before, {:.2f} now".format(*copies)] = copies[1] >= copies[0]
    for name, of in told.items():
        ratio = of["memory"] / of["predicted_memory"]
        held[f"{name}: {ratio:.2f} of the memory predicted (<= {MEMORY})"] = ratio <= MEMORY
    return held


def row(name: str, of: Mapping, first: float) -> list[str]:
    """Returns a line of the table; ``first`` is the network bytes of everything."""
    network, copied = fmean(of["network"]), sum(of["bytes"])
    experts = [f"{fmean(of[what]):.2f}" if of[what] else "" for what in ("copies", "mlt")]
    passed = f"{sum(of['in_bubbles']) / copied:.0%}"
    memory = [f"{of[what] / 1e6:.1f}" for what in ("memory", "predicted_memory")]
    return [name, f"{network / 1e6:.2f}", f"{network / first:.0%}", passed, *experts, *memory]


def main() -> int:
    """Runs all steps, prints and writes the results; returns 1 if a goal is missed."""
    parser = command_line(__doc__)
    parser.add_argument("--iterations", type=int, default=30, help="that count, of each step (default: 30)")
    parser.add_argument("--steps", nargs="+", choices=steps(), default=[*steps()], metavar="STEP", help="default: all")
    own, flags = parser.parse_known_args()
    told = {}
    for name, step in ((name, step) for name, step in steps().items() if name in own.steps):
        print(f"{name}: {' '.join(step)}", file=sys.stderr, flush=True)
        told[name] = measure([*step, *flags], own.iterations) | {"predicted_memory": predicted_memory(step)}
    first = fmean(next(iter(told.values()))["network"])
    columns = ("", "MB sent", "of all", "in bubbles", "experts", "at risk", "memory, MB", "predicted")
    show(110, [(table("Each snapshot", columns, (row(*one, first) for one in told.items())), ())])
    held = say(verdicts(told))
    described = {"machine": machine(), "flags": [*MODEL, *PEERS, *flags], "steps": steps(), "told": told}
    write_json(own.output, described)
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
