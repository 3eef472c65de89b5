"""Measures the cost of reading a malicious file of up to 1 MB, for each file type that programs decode.

    python benchmarks/hostile_files.py --output docs/results/hostile_files_cpu.json

Each file is read in a separate process, by the code of one program.  The program records the CPU seconds and the memory
of that process.  ``tests/hostile_files.py`` generates the files: too deep, too many, too large, too long.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import command_line, machine, met, say, show, table, write_json
from tests.hostile_files import MOST_MB, TYPES, measured

MOST_S = 1.0
"""Limit of CPU seconds for a file."""


def main() -> int:
    """Measures, prints the results, and writes all samples; returns 1 if a limit is exceeded."""
    parser = command_line(__doc__)
    parser.add_argument("--types", nargs="+", choices=list(TYPES), default=list(TYPES), help="types to measure")
    own = parser.parse_args()
    found = {}
    for name in own.types:
        with tempfile.TemporaryDirectory() as directory:
            found[name] = [one for one in measured(name, directory) if one[1] <= 1 << 20]
    rows, held = [], {}
    for name, outcomes in found.items():
        seconds, mb = max(one[3] for one in outcomes), max(one[4] for one in outcomes)
        ended = [sum(one[2] == how for one in outcomes) for how in ("read", "refused")]
        rows.append((name, str(len(outcomes)), *map(str, ended), f"{seconds:.2f}", f"{mb:.0f}"))
        held[f"{name}: read or refused"] = sum(ended) == len(outcomes)
        held[f"{name}: {seconds:.2f} CPU seconds, at most {MOST_S:.0f}"] = met(seconds, "<=", MOST_S) == "met"
        held[f"{name}: {mb:.0f} MB, at most {MOST_MB}"] = met(mb, "<=", MOST_MB) == "met"
    columns = ("file", "files", "read", "refused", "CPU seconds", "MB")
    show(90, [(table("Largest cost of a hostile file", columns, rows), [])])
    write_json(own.output, {"machine": machine(load=True), "files": found})
    return 0 if say(held) else 1


if __name__ == "__main__":
    sys.exit(main())
