"""Measures the time until a command line is refused: each case of the tables, in a cold process.

    python benchmarks/refusal_time.py --output docs/results/refusal_time_cpu.json

The program measures the seconds from the start of the process to the line with the code.  It also measures the CPU
seconds of the process and its children until they end, which other load changes little.  The first case runs once
before, as a warm-up.
"""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import machine, write_json
from moc.cli_output import Parser, print_lines
from moc.errors import codes_in
from tests.codes import flags, launcher
from tests.codes.case import Case
from tests.worlds import REPOSITORY

CASES = flags.CASES | launcher.CASES
MODULES = {"mocrun": "moc.launch", "controller": "moc.runtime.controller"}


def cpu_s() -> float:
    """Returns the CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def refuse(code: str, case: Case) -> dict[str, float | None]:
    """Runs a case; returns the seconds to the line with its code (None without one), and CPU seconds to its end."""
    with TemporaryDirectory() as directory:
        if case.make is not None:
            case.make(Path(directory))
        variables = {k: v for k, v in os.environ.items() if k not in ("MOC_TOKEN", "MOC_TOKEN_FILE")}
        variables |= {"PYTHONPATH": f"{directory}:{REPOSITORY}", "CUDA_VISIBLE_DEVICES": ""} | dict(case.variables)
        used, begun, elapsed = cpu_s(), time.perf_counter(), None
        with subprocess.Popen(
            [sys.executable, "-m", MODULES[case.program], *shlex.split(case.words)],
            cwd=directory,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            for line in process.stdout or ():
                if elapsed is None and code in codes_in(line):
                    elapsed = time.perf_counter() - begun
        return {"message_s": elapsed, "cpu_s": cpu_s() - used}


def main() -> int:
    """Measures, prints the table and writes it; returns the exit code."""
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--every", type=int, default=1, help="only each N-th case")
    asked = parser.parse_args()
    chosen = dict(list(CASES.items())[:: asked.every])
    refuse(*next(iter(chosen.items())))
    found = {}
    for code, case in chosen.items():
        found[code] = refuse(code, case)
        seconds = found[code]["message_s"]
        waited = "no line" if seconds is None else f"{seconds:.2f} s"
        print_lines(f"{code:40} {waited}, {found[code]['cpu_s']:.2f} CPU s", flush=True)
    seconds = [one["message_s"] for one in found.values() if one["message_s"] is not None]
    most_cpu_s = max(one["cpu_s"] or 0.0 for one in found.values())
    print_lines(
        f"of {len(found)} cases {len(seconds)} have a line: median {median(seconds):.2f} s, at most {max(seconds):.2f} "
        f"s; at most {most_cpu_s:.2f} CPU s"
    )
    write_json(asked.output, {"machine": machine(load=True), "cases": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
