"""Measures the accuracy cost of partial expert checkpoints in real runs with kills, after MoC-System's figures.

    python benchmarks/pec_accuracy.py --text wiki.txt --output docs/results/pec_accuracy.json

A GPT of 0.6 M parameters with 8 experts in each of 2 layers is trained on WikiText with the training program.  Directly
after an iteration all its workers are killed by SIGKILL, and the same command restarts them.  For each seed:

* one run without a fault;
* the grid of Figure 5: one fault at the midpoint, K_pec of 8 experts, a snapshot every I_ckpt iterations, sequential
  selection.  K = 8 saves everything, and must end with the same loss as the run without a fault;
* some of these cells with load-aware selection;
* the curves of Figure 14(a): two emulated nodes with a worker each, K_snapshot = 4 in their memory, K_persist = 1 of
  every other snapshot in storage, three faults.  baseline saves everything.  W, O and WO save weights,
  optimizer states or both partially, and recover from storage only.  WO-2L loses the memory of one node per fault,
  each time another node.

Validation loss is in nats per token.  PLT is eq. 7, over the tokens of the complete training.  The table also shows the
PLT expected with equally loaded experts.

Such small runs show that the lost tokens match the equation, that full checkpoints lose nothing, and the direction of
the loss some hundred iterations after a fault.  They do not show the cost for a large model: the experts have hardly
specialized, and half of the training compensates for the fault.  Differences are small, so the table shows two scales:

* the spread over seeds of the run without a fault;
* the distance of the curves' baseline, which loses nothing either, from that run.  There two workers share a batch, so
  the balancing loss covers half of it at a time.

``--ckpt-blocking`` makes runs repeatable: the surviving state does not depend on the load of the machine.  Faults occur
directly after a snapshot, because all workers would replay later iterations without loss.  Nothing here is timed.

Writes JSON with every sample after each run, and a plot next to it; ``--resume`` runs only what is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy import plots, report
from benchmarks.accuracy.cells import QUICK, Plan, cells
from benchmarks.accuracy.results import measure, parse
from benchmarks.common import show


def main() -> int:
    """Runs all cells, prints the table, writes JSON and a plot; returns 1 if a run failed."""
    own = parse(__doc__, "JSON file; the plot is written to the same directory")
    plan = QUICK if own.quick else Plan()

    def figures(samples: list[dict]) -> dict[str, object]:
        return {"yardsticks": report.yardsticks(samples), "summary": report.summary(samples, plan)}

    results, well = measure(own, plan, lambda seed: cells(plan, seed), figures)
    lines = report.lines(results.samples, plan, results.setup["unigram_entropy"])
    show(report.WIDTH, [(report.table(report.summary(results.samples, plan)), lines)])
    if own.output:
        plots.plot(results.samples, plan, own.output.with_suffix(".png"))
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
