"""Simulates the lost tokens of W, O, WO and WO-2L over K: MoC-System's Figure 15(a).

    python benchmarks/pec_plt.py --output docs/results/pec_plt.json

The program's policy plans, and its ledgers count, for the model of the figure: 12 layers of 16 experts, half of them on
each of two nodes.  Training is a trace of routed tokens.  Each fault loses one node with its memory, and the run
continues from the newest checkpoint:

* W, O and WO save the weights, optimizer state, or both of K experts, and the rest of all experts, to storage only;
* WO-2L saves K experts in memory, and one of them in storage.  The surviving node's experts are restored from the
  newest version in its memory or in storage.

Weights and moments are counted separately, since W loses only weights, and O only moments.  Takes seconds on one core.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, write_json
from moc.policy import Every, SnapshotPlan, policy_named
from moc.policy.token_ledger import TokenLedger
from moc.state.operators import Detail
from moc.state.shape import ModelShape, model_operators

LAYERS, EXPERTS, NODES, TOKENS = 12, 16, 2, 4096
PARTS = {"weights": "master", "moments": "exp_avg"}
WAYS = {"W": "weights", "O": "optimizer", "WO": "both", "WO-2L": "both"}
KS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Case:
    """One simulated run."""

    way: str  # key of :data:`WAYS`
    k: int  # experts of each layer in a snapshot
    iterations: int  # of the complete training
    interval: int  # iterations between two snapshots
    faults: int  # number of random faults


def plt(case: Case, seed: int) -> dict[str, float]:
    """Returns the proportion of lost tokens at the end of a run, by part of the state."""
    shape = ModelShape((1,) * LAYERS, 64, 256, 64, 64, 16, 1000, num_experts=EXPERTS, expert_ffn_hidden_size=256)
    two_levels = case.way == "WO-2L"
    settings = dict(k=case.k, k_persist=1 if two_levels else case.k, target=WAYS[case.way], ep=EXPERTS)
    policy = policy_named("pec")(model_operators(shape), Every(case.interval), **settings)
    chance = random.Random(seed)
    faults = sorted(chance.sample(range(2 * case.interval, case.iterations), case.faults))
    traffic = list(_routed(case.iterations, random.Random(seed)))
    ledgers = {part: TokenLedger.empty(dict.fromkeys(range(LAYERS), EXPERTS)) for part in PARTS}
    stored, position = dict(ledgers), 0
    while position < case.iterations:
        position += 1
        ledgers = {part: ledger.after_iteration(traffic[position - 1]) for part, ledger in ledgers.items()}
        if (plan := policy.storage.plan(position)) is not None:
            policy.on_snapshot(plan)
            policy.storage.on_write_begun(to_storage := policy.storage.part_of(plan))
            policy.storage.on_write_ended(to_storage, committed=True)
            for part, slot in PARTS.items():
                begun = ledgers[part].with_snapshot(_has(plan, slot), _has(to_storage, slot))
                ledgers[part] = stored[part] = begun.with_snapshot_completed(position).with_persist_completed(position)
        if faults and position == faults[0]:
            faults.pop(0)
            lost = chance.randrange(NODES)
            ledgers = {part: _recovered(ledger, lost, two_levels) for part, ledger in stored.items()}
            position = next(iter(ledgers.values())).iteration
            policy.recovery.on_resume(in_memory=not two_levels, in_storage=True)
            stored = dict(ledgers)
    return {part: ledger.plt() for part, ledger in ledgers.items()}


def _routed(iterations: int, chance: random.Random) -> Iterator[dict[int, list[int]]]:
    """Yields each iteration's tokens by layer and expert, with uneven, drifting load."""
    weights = [[chance.uniform(0.5, 1.5) for _ in range(EXPERTS)] for _ in range(LAYERS)]
    for _ in range(iterations):
        for row in weights:
            which = chance.randrange(EXPERTS)
            row[which] = min(2.0, max(0.25, row[which] * chance.uniform(0.9, 1.1)))
        yield {layer: [int(TOKENS * one / sum(row)) for one in row] for layer, row in enumerate(weights)}


def _has(plan: SnapshotPlan, slot: str) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {layer: [] for layer in range(LAYERS)}
    for name, detail in plan.operators.items():
        if ".expert." in name and Detail(detail).holds(slot):
            _, layer, _, expert = name.split(".")
            found[int(layer)].append(int(expert))
    return found


def _recovered(ledger: TokenLedger, lost: int, two_levels: bool) -> TokenLedger:
    """Returns the recovered ledger after the loss of a node with its memory, from the newest checkpoint's ledger."""
    restored: dict[int, dict[int, int]] = {}
    for place, layer in enumerate(ledger.layers):
        restored[layer] = {}
        for expert in range(EXPERTS):
            gone = not two_levels or expert // (EXPERTS // NODES) == lost
            version = ledger.storage[place][expert]
            restored[layer][expert] = (version if gone else max(version, ledger.memory[place][expert])).iteration
    return ledger.after_recovery(restored)


def main() -> None:
    """Prints a table and writes JSON."""
    parser = command_line(__doc__)
    parser.add_argument("--iterations", type=int, default=2000, help="iterations of the training (default: 2000)")
    parser.add_argument("--interval", type=int, default=10, help="iterations between snapshots (default: 10)")
    parser.add_argument("--faults", type=int, default=4, help="of a run (default: 4)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each (default: 5)")
    parser.add_argument("--k", type=int, nargs="+", default=list(KS), help="numbers of experts (default: 1 2 4 8 16)")
    own = parser.parse_args()
    rows = []
    for way in WAYS:
        for k in own.k:
            case = Case(way, k, own.iterations, own.interval, own.faults)
            runs = [plt(case, seed) for seed in range(own.seeds)]
            row = {"way": way, "k": k, "samples": runs}
            row |= {part: statistics.mean(run[part] for run in runs) for part in PARTS}
            row |= {f"{part}_sd": statistics.pstdev(run[part] for run in runs) for part in PARTS}
            rows.append(row)
            print(" ".join(f"{x:>8}" for x in (way, k, f"{row['weights']:.3%}", f"{row['moments']:.3%}")), flush=True)
    settings = {name: getattr(own, name) for name in ("iterations", "interval", "faults", "seeds")}
    model = {"layers": LAYERS, "experts": EXPERTS, "nodes": NODES}
    write_json(own.output, {"model": model, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
