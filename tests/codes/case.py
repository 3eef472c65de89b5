"""What a table of codes consists of."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.worlds import REPOSITORY

PROGRAM = str(REPOSITORY / "pretrain_gpt_moe.py")


@dataclass(frozen=True)
class Case:
    """A command line that ends with an error.

    Attributes:
        program: name of the program, such as ``mocrun``.
        words: its arguments, separated as by a shell; the current directory is empty but for what ``make`` writes.
        status: the exit code.
        named: what the output names, such as a flag or a file.
        make: writes files into the current directory.
        variables: of the environment.
        cold: the process is not forked from a warm one, since ``PYTHONPATH`` or its output at the start matters.
    """

    program: str
    words: str
    status: int
    named: str = ""
    make: Callable[[Path], object] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    cold: bool = False


def writes(**texts: str) -> Callable[[Path], None]:
    """Writes files; in a name, two underscores stand for a dot."""

    def make(root: Path) -> None:
        for name, text in texts.items():
            (root / name.replace("__", ".")).write_text(text, encoding="utf-8")

    return make


def fault(text: str, make: Callable[[Path], object] | None = None) -> Callable[[Path], None]:
    """Writes what each Python process of the case runs at its start, such as the failure of a system call."""

    def written(root: Path) -> None:
        if make is not None:
            make(root)
        (root / "sitecustomize.py").write_text(textwrap.dedent(text), encoding="utf-8")

    return written
