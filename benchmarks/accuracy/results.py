"""Stores the samples of many runs in a JSON file that lets an interrupted benchmark resume."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from benchmarks.accuracy import report
from benchmarks.accuracy.cells import MODEL_FLAGS, Cell, Plan
from benchmarks.accuracy.runs import Dataset, RunFailed, prepare, run, unigram_entropy
from benchmarks.common import command_line, machine_and_versions

Figures = Callable[[list[dict]], Mapping[str, object]]
"""Function from samples to figures by name."""


class Results:
    """Samples and an optional JSON file, which is rewritten after each run; all samples share ``setup``."""

    def __init__(self, setup: dict, path: Path | None, figures: Figures):
        self.setup, self._path, self._figures = json.loads(json.dumps(setup)), path, figures
        self.samples: list[dict] = []

    def resume(self) -> None:
        """Loads the samples of an earlier file.

        Raises:
            RunFailed: the file was measured with another setup.
        """
        if self._path is None or not self._path.exists():
            return
        earlier = json.loads(self._path.read_text())
        other = sorted(name for name, value in self.setup.items() if earlier.get(name) != value)
        if other:
            raise RunFailed(f"{self._path} was measured with other {' and '.join(other)}: take another --output")
        self.samples = earlier["samples"]

    def missing(self, wanted: Sequence[Cell]) -> list[Cell]:
        """Returns the cells without a sample."""
        there = {report.cell_of(sample, type(cell)) for cell in wanted[:1] for sample in self.samples}
        return [cell for cell in wanted if cell not in there]

    def add(self, sample: dict) -> None:
        """Adds a sample and writes the file."""
        self.samples.append(json.loads(json.dumps(sample)))
        self.write()

    def write(self) -> None:
        """Writes all samples, and the figures computed from them."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            samples = ",\n".join("  " + json.dumps(one) for one in self.samples)  # one line per sample
            head = json.dumps(self.setup | dict(self._figures(self.samples)), indent=1).removesuffix("\n}")
            self._path.write_text(f'{head},\n "samples": [\n{samples}\n ]\n}}\n')


def run_all(wanted: Sequence[Cell], jobs: int, plan: Plan, dataset: Dataset, scratch: Path, results: Results) -> bool:
    """Runs cells, ``jobs`` at a time, and prints their results; returns whether all succeeded."""
    well = True
    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(run, cell, plan, dataset, scratch): cell for cell in wanted}
        for number, done in enumerate(as_completed(waiting), 1):
            cell = waiting[done]
            try:
                sample = done.result()
                results.add(sample)
                said = f"seed {cell.seed}, {cell.name}: loss {sample['loss']:.4f}, PLT {sample['plt']:.2%}"
            except RunFailed as error:
                well, said = False, f"failed: {error}"
            print(f"{number}/{len(wanted)} {said}", file=sys.stderr, flush=True)
    return well


def describe(text: Path, plan: Plan, dataset: Dataset) -> dict:
    """Returns the setup of the measurement."""
    return machine_and_versions() | {
        "text": {"name": text.name, "sha256": hashlib.sha256(text.read_bytes()).hexdigest()},
        "unigram_entropy": unigram_entropy(dataset.prefix),
        "plan": asdict(plan),
        "flags": MODEL_FLAGS,
    }


def parse(description: str | None, output: str) -> argparse.Namespace:
    """Parses a benchmark's flags; ``output`` is the help text of ``--output``."""
    parser = command_line(description, output)
    parser.add_argument("--text", type=Path, required=True, help="a file of WikiText-2, as text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="(default: 1 2 3)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--quick", action="store_true", help="a few short runs of the first seed, to try the benchmark")
    parser.add_argument("--resume", action="store_true", help="keep the samples of --output, and run what is missing")
    parser.add_argument("--directory", type=Path, help="for checkpoints (default: where temporary files go)")
    return parser.parse_args()


def measure(
    own: argparse.Namespace, plan: Plan, of_seed: Callable[[int], Sequence[Cell]], figures: Figures
) -> tuple[Results, bool]:
    """Runs all cells of all seeds and stores their samples; returns the results and whether all runs succeeded."""
    seeds = own.seeds[:1] if own.quick else own.seeds
    with tempfile.TemporaryDirectory(prefix="accuracy-", dir=own.directory) as scratch:
        try:
            dataset = prepare(own.text, Path(scratch))
            results = Results(describe(own.text, plan, dataset), own.output, figures)
            if own.resume:
                results.resume()
        except RunFailed as error:
            sys.exit(f"{Path(sys.argv[0]).name}: {error}.")
        wanted = results.missing([cell for seed in seeds for cell in of_seed(seed)])
        well = run_all(wanted, own.jobs, plan, dataset, Path(scratch), results)
    results.write()
    return results, well
