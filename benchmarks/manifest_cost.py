"""Measures the cost of reading a manifest of many operators, relative to parsing its JSON.

    flock /tmp/timing.lock python benchmarks/manifest_cost.py --output docs/results/manifest_cost_cpu.json

The same text is read in four ways: by ``json.loads`` only; by a parser that searches each object for repeated keys; by
a parser that compares the hash, and the text with its canonical form, which repeats no key; and by the complete reader,
which also decodes each entry by its declared type.  All run in one process, in turns, and are measured in CPU seconds.
A ratio divides the best time by the best of ``json.loads``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, rotated, show, table, write_json
from moc.files import decode
from moc.store.manifest import FileEntry, Manifest, OperatorEntry, parse_verified

OPERATORS = 100_000
ROUNDS = 8
TARGET = 4.0
"""Largest ratio of the complete reader to ``json.loads``."""


def manifest_of(operators: int) -> Manifest:
    """Returns the manifest of a full checkpoint of a model with this many operators, one in eight of them dense."""
    slots = ("param", "master", "exp_avg", "exp_avg_sq")
    entries = {
        f"layers.{number // 512}.{'expert' if number % 8 else 'attention'}.{number % 512}": OperatorEntry(
            "full", 1000, dict.fromkeys(slots, 4_194_304 + number)
        )
        for number in range(operators)
    }
    writers = max(1, operators // 100)
    files = {f"rank_{rank:05d}.safetensors": FileEntry(1 << 30, 1 << 16, f"{rank:032x}") for rank in range(writers)}
    return Manifest(1000, "full", writers, files, entries, {"world": writers}, {"consumed_samples": 8000})


def ways(text: bytes) -> dict[str, Callable[[], object]]:
    """Returns the readers of a text, by name."""
    return {
        "json.loads": lambda: json.loads(text),
        "keys compared": lambda: decode.parse(text),
        "hash and keys compared": lambda: parse_verified(text, "manifest.json"),
        "complete": lambda: Manifest.from_json(text, "manifest.json"),
    }


def measured(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Returns the CPU seconds of each action in each round, after a warm-up round."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name in rotated(list(actions), number):
            begun = time.process_time()
            actions[name]()
            found[name].append(time.process_time() - begun)
    return {name: samples[1:] for name, samples in found.items()}


def ratios(samples: dict[str, list[float]]) -> dict[str, float]:
    """Returns the best time of each reader, divided by the best of ``json.loads``."""
    best = {name: min(times) for name, times in samples.items()}
    return {name: value / best["json.loads"] for name, value in best.items()}


def main() -> None:
    """Measures, prints the results, and writes all samples."""
    parser = command_line(__doc__)
    parser.add_argument("--operators", type=int, default=OPERATORS, help="entries (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="samples of each way (default: %(default)s)")
    own = parser.parse_args()
    text = manifest_of(own.operators).to_json().encode()
    samples = measured(ways(text), own.rounds)
    relative = ratios(samples)
    rows = [[name, f"{min(samples[name]):.2f}", f"{ratio:.2f}"] for name, ratio in relative.items()]
    title = f"a manifest, {len(text) / 1e6:.1f} MB"
    show(80, [(table(title, ["read", "CPU seconds", "ratio"], rows), ())])
    told = {"operators": own.operators, "bytes": len(text), "cpu_s": samples, "ratios": relative, "target": TARGET}
    write_json(own.output, {"machine": machine(), **told})


if __name__ == "__main__":
    main()
