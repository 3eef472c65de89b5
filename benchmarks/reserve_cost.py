"""Measures the cost of allocating the memory of snapshots at start, in seconds per GB.

    flock /tmp/timing.lock python benchmarks/reserve_cost.py --output docs/results/reserve_cost_cpu.json

A rank's buffer is allocated and mapped into the process.  A peer copy, and a file of a retained expert version, are
only allocated.  Both are measured in turns, in CPU seconds and in seconds of the clock; the best of all rounds counts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, rotated, show, table, write_json
from moc.store.buffers import HostBuffer
from moc.store.reserved_memory import reserve_files

GB = 10**9


def allocations(directory: Path, nbytes: int) -> dict[str, Callable[[], object]]:
    """Returns the allocations to measure, by name."""
    return {
        "a rank's buffer": lambda: HostBuffer(nbytes, directory / "buffer"),
        "a copy, or a carried expert": lambda: reserve_files(directory / "slots", "copy", [nbytes]),
    }


def measured(directory: Path, nbytes: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Returns the seconds per GB of each allocation in each round, after a warm-up round."""
    actions = allocations(directory, nbytes)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name in rotated(list(actions), number):
            clock, cpu = time.perf_counter(), time.process_time()
            kept = actions[name]()
            seconds = {"s": time.perf_counter() - clock, "cpu_s": time.process_time() - cpu}
            found[name].append({what: value * GB / nbytes for what, value in seconds.items()})
            del kept
            for path in [path for path in directory.rglob("*") if path.is_file()]:
                path.unlink()
    return {name: samples[1:] for name, samples in found.items()}


def main() -> None:
    """Measures, prints the results, and writes all samples."""
    parser = command_line(__doc__)
    parser.add_argument("--gb", type=float, default=1.0, help="GB of each allocation (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=6, help="samples of each way (default: %(default)s)")
    parser.add_argument("--memory", default="/dev/shm", help="memory file system (default: %(default)s)")
    own = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=own.memory) as directory:
        samples = measured(Path(directory), int(own.gb * GB), own.rounds)
    best = {name: {what: min(one[what] for one in its) for what in ("s", "cpu_s")} for name, its in samples.items()}
    rows = [[name, f"{one['s']:.2f}", f"{one['cpu_s']:.2f}"] for name, one in best.items()]
    show(80, [(table("per GB", ["allocated", "seconds", "CPU seconds"], rows), ())])
    write_json(own.output, {"machine": machine(load=True), "gb": own.gb, "samples": samples, "best": best})


if __name__ == "__main__":
    main()
