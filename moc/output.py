"""What programs put out: why they end, sizes for people, files that are there whole or not at all, a bar."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ToolError(Exception):
    """Ends a program: one sentence for the user, no traceback."""


def refused(program: str, error: Exception, path: object = "") -> int:
    """Says on stderr why a program ends.

    Args:
        program: its name.
        error: what ended it.
        path: the file that an OSError without a name is about.

    Returns:
        The exit status.
    """
    said = f"{error.filename or path}: {error.strerror or error}." if isinstance(error, OSError) else error
    print(f"{program}: {said}", file=sys.stderr)
    return 1


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """A name to write to, which takes the place of ``path`` once all is well; its directory is made."""
    partial = f"{os.fspath(path)}.partial"
    os.makedirs(os.path.dirname(os.path.abspath(partial)), exist_ok=True)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


def human(size: float) -> str:
    """A number of bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.2f} TB"


@contextmanager
def progress(total: int, what: str = "") -> Iterator[Callable[[int], None]]:
    """Shows a bar on a terminal, and nothing elsewhere; yields what moves it on by a number of bytes.

    Args:
        total: bytes of all work.
        what: stands before the bar.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
