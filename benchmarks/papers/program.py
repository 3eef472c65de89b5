"""Prints reproduced tables and figures with the papers' values and the errors: ``python -m benchmarks.papers NAME``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from benchmarks.papers import lazarus, moc_system, moetion, moevement, sizes
from benchmarks.papers.reproduction import Reproduction
from moc.cli_output import Parser
from moc.simulate.tables import aligned

REPRODUCTIONS: dict[str, Callable[[], Reproduction]] = {
    "moevement-table3": moevement.table_3,
    "moevement-table7": moevement.table_7,
    "moevement-fig11": moevement.figure_11,
    "moevement-fig1": moevement.figure_1,
    "moc-fig10": sizes.figure_10,
    "moc-fig13": moc_system.figure_13,
    "moc-fig15": sizes.figure_15,
    "moetion-fig4": moetion.figure_4,
    "moetion-fig7": moetion.figure_7,
    "moetion-fig9": moetion.figure_9,
    "moetion-fig10": moetion.figure_10,
    "lazarus-fig4": lazarus.figure_4,
}
"""Reproductions by command-line name."""

OF_LOADS: dict[str, Callable[[moetion.Loads], Reproduction]] = {
    "moetion-fig11": moetion.figure_11,
    "lazarus-fig8": lazarus.figure_8,
}
"""Reproductions that need recorded expert loads."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = Parser("python -m benchmarks.papers", description="Print a paper's figures next to ours.")
    names = [*REPRODUCTIONS, *OF_LOADS]
    parser.add_argument("name", choices=names, metavar="NAME", help=f"one of {', '.join(names)}")
    parser.add_argument(
        "--routing", type=Path, metavar="FILE", help="recorded loads: an .npz file, tokens[iterations, layers, experts]"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if (args.routing is None) == (args.name in OF_LOADS):
        parser.error(
            f"{args.name} needs recorded loads of experts: give them by --routing FILE, an .npz file with "
            "tokens[iterations, layers, experts]"
            if args.name in OF_LOADS
            else f"{args.name} takes no recorded loads: drop --routing"
        )
    try:
        found = OF_LOADS[args.name](moetion.read_loads(args.routing)) if args.routing else REPRODUCTIONS[args.name]()
    except ValueError as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(dataclasses.asdict(found) | {"summary": found.summary()}, indent=2))
        return 0
    header = ["", "paper", "ours", "error", *(["common law", "error"] if found.has_common else [])]
    rows = [row.cells(found.has_common) for row in found.rows]
    print(found.title, "", *aligned([header, *rows]), "", *found.summary(), "", *found.notes, sep="\n")
    return 0
