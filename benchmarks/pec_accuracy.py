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

import argparse
import hashlib
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accuracy import plots, report
from benchmarks.accuracy.cells import MODEL_FLAGS, QUICK, Cell, Plan, cells
from benchmarks.accuracy.runs import Dataset, RunFailed, prepare, run, unigram_entropy
from benchmarks.common import command_line, machine_and_versions, show


class Results:
    """The JSON file, if there is one, written anew after each run; ``setup`` is what all samples have in common."""

    def __init__(self, setup: dict, path: Path | None):
        self.setup, self._path = json.loads(json.dumps(setup)), path
        self.samples: list[dict] = []

    def resume(self) -> None:
        """Takes over the samples of an earlier file.

        Raises:
            RunFailed: it has been measured in another way.
        """
        if self._path is None or not self._path.exists():
            return
        earlier = json.loads(self._path.read_text())
        other = sorted(name for name, value in self.setup.items() if earlier.get(name) != value)
        if other:
            raise RunFailed(f"{self._path} was measured with other {' and '.join(other)}: take another --output")
        self.samples = earlier["samples"]

    def missing(self, wanted: list[Cell]) -> list[Cell]:
        """Those of which there is no sample."""
        there = {report.cell_of(sample) for sample in self.samples}
        return [cell for cell in wanted if cell not in there]

    def add(self, sample: dict, plan: Plan) -> None:
        self.samples.append(json.loads(json.dumps(sample)))
        self.write(plan)

    def write(self, plan: Plan) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            told = {"yardsticks": report.yardsticks(self.samples), "summary": report.summary(self.samples, plan)}
            samples = ",\n".join("  " + json.dumps(one) for one in self.samples)  # a line each
            head = json.dumps(self.setup | told, indent=1).removesuffix("\n}")
            self._path.write_text(f'{head},\n "samples": [\n{samples}\n ]\n}}\n')


def run_all(wanted: list[Cell], jobs: int, plan: Plan, dataset: Dataset, scratch: Path, results: Results) -> bool:
    """Runs cells, ``jobs`` at a time, and says how each went; whether all went well."""
    well = True
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(run, cell, plan, dataset, scratch): cell for cell in wanted}
        for number, done in enumerate(as_completed(waiting), 1):
            cell = waiting[done]
            try:
                sample = done.result()
                results.add(sample, plan)
                said = f"seed {cell.seed}, {cell.name}: loss {sample['loss']:.4f}, PLT {sample['plt']:.2%}"
            except RunFailed as error:
                well, said = False, f"failed: {error}"
            print(f"{number}/{len(wanted)} {said}", file=sys.stderr, flush=True)
    return well


def describe(text: Path, plan: Plan, dataset: Dataset) -> dict:
    """What the figures were made with."""
    return machine_and_versions() | {
        "text": {"name": text.name, "sha256": hashlib.sha256(text.read_bytes()).hexdigest()},
        "unigram_entropy": unigram_entropy(dataset.prefix),
        "plan": asdict(plan),
        "flags": MODEL_FLAGS,
    }


def parse() -> argparse.Namespace:
    """The benchmark's flags."""
    parser = command_line(__doc__, "JSON file; the plot goes beside it")
    parser.add_argument("--text", type=Path, required=True, help="a file of WikiText-2, as text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a few short runs of the first seed, to try the benchmark")
    parser.add_argument("--resume", action="store_true", help="keep the samples of --output, and run what is missing")
    parser.add_argument("--directory", type=Path, help="for checkpoints (default: where temporary files go)")
    return parser.parse_args()


def main() -> int:
    """Runs all cells, prints the table, writes JSON and a plot; 1 if a run failed."""
    own = parse()
    plan = QUICK if own.quick else Plan()
    seeds = own.seeds[:1] if own.quick else own.seeds
    with tempfile.TemporaryDirectory(prefix="pec_accuracy-", dir=own.directory) as scratch:
        try:
            dataset = prepare(own.text, Path(scratch))
            results = Results(describe(own.text, plan, dataset), own.output)
            if own.resume:
                results.resume()
        except RunFailed as error:
            sys.exit(f"pec_accuracy.py: {error}.")
        wanted = results.missing([cell for seed in seeds for cell in cells(plan, seed)])
        well = run_all(wanted, own.jobs, plan, dataset, Path(scratch), results)
    lines = report.lines(results.samples, plan, results.setup["unigram_entropy"])
    show(report.WIDTH, [(report.table(report.summary(results.samples, plan)), lines)])
    if own.output:
        results.write(plan)
        plots.plot(results.samples, plan, own.output.with_suffix(".png"))
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
