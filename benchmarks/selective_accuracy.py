"""Measures the accuracy cost of selective checkpoints, with and without compensation, after MoEtion's Figure 8.

    python benchmarks/selective_accuracy.py --text wiki.txt --output docs/results/selective_accuracy.json

The model and the text are the same as in ``benchmarks/pec_accuracy.py``, with a capacity factor of 1, so that experts
drop tokens.  Directly after the iterations at 20, 40, 60 and 80 % of a run it is killed by SIGKILL, and the same
command restarts it.  A snapshot every 4 iterations has 2 of 8 experts of each layer (25 %, as in the paper), by tokens
times age.

Each seed has a run without faults, a run without compensation of lost tokens, and two with compensation.  Experts may
then exceed their capacity by 10 % (section 6) or by 50 %.  All see the same samples in the same iterations.

Goals, from Figure 8: a spike of at most 0.5, and a final loss within the seeds' standard deviation of the run without
faults.  A spike is the largest excess of a training loss over the same iteration without faults.  Nothing here is
timed.  The model is small and its experts have hardly specialized: do not extrapolate to large models.

Writes JSON with every sample after each run; ``--resume`` runs only what is missing.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy.cells import QUICK, Cell, Plan
from benchmarks.accuracy.results import measure, parse
from benchmarks.common import say, show, table

WIDTH = 110  # columns of the table
EXPERTS, INTERVAL = 2, 4  # of each layer in a snapshot, and iterations between snapshots
FAULTS = (0.2, 0.4, 0.6, 0.8)
BOOSTS = (0.0, 0.1, 0.5)
MOST_SPIKE = 0.5


@dataclass(frozen=True)
class SelectiveCell(Cell):
    """One run; ``boost`` is None without faults."""

    boost: float | None = None

    @property
    def name(self) -> str:
        """Everything but the seed."""
        return "fault-free" if self.boost is None else f"boost {self.boost:g}"

    @property
    def traced(self) -> bool:
        """Whether the sample has the losses of all iterations."""
        return True

    def flags(self, plan: Plan, directory: Path, memory: Path) -> list[str]:
        """Adds the flags of selective checkpoints to the base class's flags."""
        flags = ["--moe-expert-capacity-factor", 1, "--moe-token-dispatcher-type", "alltoall"]
        if self.boost is not None:
            flags += ["--ckpt-policy", "selective", "--selective-experts", EXPERTS, "--snapshot-interval", INTERVAL]
            flags += ["--selective-boost", self.boost]
        return [*super().flags(plan, directory, memory), *map(str, flags)]


def cells(plan: Plan, seed: int) -> list[SelectiveCell]:
    """Returns all runs of one seed."""
    faults = tuple(round(share * plan.iterations) for share in FAULTS)
    return [SelectiveCell("fault-free", seed), *(SelectiveCell("selective", seed, faults, boost=b) for b in BOOSTS)]


def summary(samples: list[dict]) -> dict[str, Any]:
    """Returns means over seeds, and ``spread_over_seeds``: the standard deviation of the loss without faults.

    Returns:
        For each run, in ``summary``: ``cell``, ``seeds``, means ``plt`` and ``loss``; ``difference``, the losses' mean
        difference from the run without faults of the same seed, with ``lowest`` and ``highest``; ``spike``, the largest
        over seeds; ``made_up``, mean share of compensated lost tokens.
    """
    free = {s["seed"]: s for s in samples if s["boost"] is None}
    groups: dict[float, list[dict]] = {}
    for sample in samples:
        if sample["boost"] is not None and sample["seed"] in free:
            groups.setdefault(sample["boost"], []).append(sample)
    rows = [_row(groups[boost], free) for boost in sorted(groups)]
    losses = [s["loss"] for s in free.values()]
    return {"spread_over_seeds": statistics.stdev(losses) if len(losses) > 1 else None, "summary": rows}


def _row(group: list[dict], free: dict[int, dict]) -> dict:
    off = [s["loss"] - free[s["seed"]]["loss"] for s in group]
    return {
        "cell": SelectiveCell("selective", 0, boost=group[0]["boost"]).name,
        "seeds": len(group),
        "plt": statistics.mean(s["plt"] for s in group),
        "loss": statistics.mean(s["loss"] for s in group),
        "difference": statistics.mean(off),
        "lowest": min(off),
        "highest": max(off),
        "spike": max(spike(s["train_losses"], free[s["seed"]]["train_losses"]) for s in group),
        "made_up": statistics.mean(made_up(s.get("owed", [])) for s in group),
    }


def spike(losses: list[float], others: list[float]) -> float:
    """Returns the largest excess of a loss over the run without faults, in one iteration."""
    return max(loss - other for loss, other in zip(losses, others, strict=True))


def made_up(owed: list[int]) -> float:
    """Returns compensated tokens as a share of lost tokens, from the token debt after each iteration.

    Tokens compensated by the first iteration after a recovery are invisible, and count as never lost.
    """
    steps = [now - before for before, now in zip([0, *owed], owed, strict=False)]
    lost = sum(step for step in steps if step > 0)
    return -sum(step for step in steps if step < 0) / lost if lost else 0.0


def verdicts(told: dict) -> dict[str, bool]:
    """Returns whether each goal is met, by sentence."""
    found = {}
    for row in told["summary"]:
        found[f"{row['cell']}: spike {row['spike']:.3f} <= {MOST_SPIKE}"] = row["spike"] <= MOST_SPIKE
        if (spread := told["spread_over_seeds"]) is not None:
            within = abs(row["difference"]) <= spread
            found[f"{row['cell']}: ends {row['difference']:+.4f} off, within {spread:.4f} of the seeds"] = within
    return found


def _table(rows: list[dict]):
    lines = [
        [
            row["cell"],
            str(row["seeds"]),
            f"{row['plt']:.2%}",
            f"{row['made_up']:.1%}",
            f"{row['loss']:.4f}",
            f"{row['difference']:+.4f}",
            f"{row['lowest']:+.4f} .. {row['highest']:+.4f}",
            f"{row['spike']:+.3f}",
        ]
        for row in rows
    ]
    columns = ["run", "seeds", "PLT", "made up", "validation loss", "difference", "lowest .. highest", "spike"]
    return table("Means over seeds; differences are from the run without faults", columns, lines)


def main() -> int:
    """Runs all cells, prints the table, writes JSON; returns 1 if a run failed or a goal is missed."""
    own = parse(__doc__, "JSON file")
    plan = QUICK if own.quick else Plan()
    results, well = measure(own, plan, lambda seed: cells(plan, seed), summary)
    told = summary(results.samples)
    show(WIDTH, [(_table(told["summary"]), [])])
    return int(not (say(verdicts(told)) and well))


if __name__ == "__main__":
    sys.exit(main())
