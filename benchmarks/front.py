"""Compares the time of an iteration under our loop and under Megatron-LM's, for the same script in one run.

    python -m benchmarks.front [--turns N] [--workers N] SCRIPT FLAGS

FLAGS are the script's; they specify a model, and at least 30 iterations with --log-interval 1.  Turns alternate between
Megatron-LM's loop, ours without snapshots, and ours with a snapshot in memory after each iteration.  The first ten
iterations of each job are omitted.  Two ratios are printed: of the medians of each turn, and of the fastest tenth of
all iterations, which other load on the machine does not change.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.live.job import free_ports
from moc.cli_output import Parser, print_lines

_LINE = re.compile(r"iteration\s+(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)")
_WARM_UP = 10
KINDS = ("stock", "ours", "ours with snapshots")


def main() -> None:
    """Runs all turns and prints the ratios."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("script")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    own = parser.parse_args()
    flags = own.flags[1:] if own.flags[:1] == ["--"] else own.flags
    measured: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    for turn in range(own.turns):
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as directory:
                command = command_of(kind, own.script, own.workers, flags, Path(directory))
                measured[kind].append(times(command))
            median = statistics.median(measured[kind][-1])
            print_lines(f"turn {turn + 1}: {kind}: {median:.1f} ms per iteration (median)", flush=True)
    medians = {kind: [statistics.median(turn) for turn in turns] for kind, turns in measured.items()}
    fastest = {kind: _fastest_tenth([ms for turn in turns for ms in turn]) for kind, turns in measured.items()}
    for kind in KINDS[1:]:
        ratios = [stock / ours for stock, ours in zip(medians["stock"], medians[kind], strict=True)]
        values = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print_lines(f"throughput of {kind} / stock: median {statistics.median(ratios):.3f} of {values}")
        print_lines(f"  of the fastest tenth: {fastest['stock'] / fastest[kind]:.3f} ({fastest[kind]:.1f} ms)")


def _fastest_tenth(values: list[float]) -> float:
    return statistics.mean(sorted(values)[: max(len(values) // 10, 1)])


def command_of(kind: str, script: str, workers: int, flags: list[str], directory: Path) -> list[str]:
    """Returns the command line of a job, whose files are in ``directory``."""
    python = [sys.executable, "-m"]
    if kind == "stock":
        launcher = ["torch.distributed.run", "--nproc-per-node", str(workers), "--master-port", str(*free_ports(1))]
        return [*python, *launcher, str(Path(__file__).parent / "stock_loop.py"), script, *flags]
    snapshots = f"--ckpt-policy full --snapshot-interval 1 --ckpt-tier memory --ckpt-dir {directory}"
    own = snapshots.split() if kind != "ours" else []
    return [*python, "moc.launch", "--nproc-per-node", str(workers), script, *flags, *own]


def times(command: list[str]) -> list[float]:
    """Runs a job; returns the milliseconds of its iterations, without the first ones.

    Raises:
        SystemExit: the job failed, or had too few iterations.
    """
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = [(int(number), float(ms)) for number, ms in _LINE.findall(ended.stdout)]
    measured = [ms for number, ms in found if number > _WARM_UP]
    if ended.returncode or not measured:
        what = f"ended with code {ended.returncode} after {len(found)} iterations"
        sys.exit(f"{' '.join(command)} {what}:\n{ended.stdout[-2000:]}")
    return measured


if __name__ == "__main__":
    main()
