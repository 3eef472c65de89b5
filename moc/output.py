"""Output of command-line tools: error messages, readable sizes, atomic files and progress bars."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moc.files.text import printable
from moc.files.tree import remove_own


class ToolError(Exception):
    """Ends a program with one sentence for the user and no traceback."""


def refused(program: str, error: Exception, path: object = "") -> int:
    """Prints to stderr why a program ends, and returns its exit status; ``path`` is of an OSError that names none."""
    said = f"{error.filename or path}: {error.strerror or error}." if isinstance(error, OSError) else error
    print(f"{program}: {printable(said)}", file=sys.stderr)
    return 1


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the path of a new file that replaces ``path`` on success; creates its directory.

    Nobody can foresee its name, and plant a link there.
    """
    partial = f"{os.fspath(path)}.{secrets.token_hex(8)}.partial"
    os.makedirs(os.path.dirname(os.path.abspath(partial)), exist_ok=True)
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        yield partial
        os.replace(partial, path)
    finally:
        remove_own(Path(partial))


def human(size: float) -> str:
    """A readable number of bytes, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.2f} TB"


@contextmanager
def progress(total: int, what: str = "") -> Iterator[Callable[[int], None]]:
    """Shows a progress bar of ``total`` bytes on a terminal; yields a function that advances it by some."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
