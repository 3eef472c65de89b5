"""Shared functions of benchmarks: flags, description of the machine, JSON, verdicts, tables and plots."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moc.cli_output import Parser


def command_line(description: str | None, output: str = "JSON file") -> argparse.ArgumentParser:
    """Returns a parser with the flag ``--output``, whose help shows the complete description."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help=output)
    return parser


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Returns the order of turns in a round.

    Each name is equally often at each position, and equally often before and after each other name.

    Args:
        names: participants.
        number: of the round, from 0; the order is balanced after every ``2 * len(names)`` rounds.
    """
    cycle, first = divmod(number, len(names))
    order = [*names[first:], *names[:first]]
    return order if cycle % 2 == 0 else order[::-1]


def machine(load: bool = False) -> dict[str, Any]:
    """Describes the machine; with ``load``, includes its present load."""
    import torch

    found = {"cpus": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    return found | ({"load_before": os.getloadavg()[0]} if load else {})


def machine_and_versions() -> dict[str, dict]:
    """Describes the machine and the library versions for benchmarks of saving."""
    return {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("torch", "megatron-core")},
    }


def write_json(path: Path | None, told: Mapping) -> None:
    """Writes a JSON file if a path is given."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told, indent=1) + "\n")


def say(held: Mapping[str, bool]) -> bool:
    """Prints each verdict; returns whether all hold."""
    for what, holds in held.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {what}", flush=True)
    return all(held.values())


def met(value: float, sign: str, target: float) -> str:
    """Returns ``met`` or ``missed``; the sign is ``<=`` or ``>=``."""
    return "met" if (value <= target if sign == "<=" else value >= target) else "missed"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]):
    """Returns a console table, right-aligned in all columns but the first."""
    from rich.table import Table

    result = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        result.add_column(name, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        result.add_row(*row)
    return result


def show(width: int, parts: Iterable[tuple[object, Iterable[str]]]) -> None:
    """Prints tables, each followed by its lines, on a console of at least ``width`` columns."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, width)
    for shown, lines in parts:
        console.print(shown)
        for line in lines:
            console.print(line, highlight=False, soft_wrap=True)
