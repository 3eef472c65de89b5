"""What partial experts checkpoints cost in accuracy: real runs, killed and recovered, after MoC-System's figures.

    python benchmarks/pec_accuracy.py --text wiki.txt --output docs/results/pec_accuracy.json

A GPT of 0.6 M parameters with 8 experts in each of 2 layers is trained on WikiText with the training program.  Right
after an iteration all its workers are killed by SIGKILL, and the same command starts them again.  For each seed:

* one run without a fault;
* the grid of Figure 5: one fault at the midpoint, K_pec of 8 experts, a snapshot every I_ckpt iterations, sequential
  selection; K = 8 saves everything, and must end with the very loss of the run without a fault;
* some of these cells with load-aware selection;
* the curves of Figure 14(a): two emulated nodes with a worker each, K_snapshot = 4 in their memory, K_persist = 1 of
  every other snapshot in storage, three faults.  baseline saves everything; W, O and WO choose weights, optimizer
  states or both, and after a fault have storage alone; WO-2L loses the memory of one node only, each time of another.

Validation loss is in nats a token.  PLT is eq. 7, over the tokens of the whole training.  Beside the one that was
counted stands the one to expect if all experts were equally busy.

Such small runs show that lost tokens are what the equation says, that nothing is lost where all is saved, and which
way the loss goes some hundred iterations after a fault; not what that costs a model of useful size.  Their experts have
hardly begun to differ, and half of the training is left to make up for the fault.  Differences are small: so each
stands beside the spread over seeds of the run without a fault, and beside how far the curves' baseline is from that
run, which loses nothing either; there two workers share a batch, so that the balancing loss is over halves of it.

``--ckpt-blocking`` makes runs repeatable: what a fault finds does not depend on how busy the machine is.  Faults fall
right after a snapshot: what comes later would be replayed by all, and is not lost.  Nothing here is timed.

Writes JSON with every sample, after each run, and a plot beside it; ``--resume`` goes on with what is missing.
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
    """Runs all cells, prints the table, writes JSON and a plot; 1 if a run failed."""
    own = parse(__doc__, "JSON file; the plot goes beside it")
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
