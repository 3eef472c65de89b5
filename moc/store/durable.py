"""Small files and names on a local disk, durable when the call returns."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path


def write_durably(path: Path, text: str, tag: str = "", check: Callable[[], None] | None = None) -> None:
    """Replaces a small file atomically; it is on disk when this returns.  Arguments: :func:`write_parts_durably`."""
    write_parts_durably(path, [text.encode()], tag=tag, check=check)


def write_parts_durably(
    path: Path, parts: Iterable, name_too: bool = True, tag: str = "", check: Callable[[], None] | None = None
) -> None:
    """Replaces a file by the concatenation of some buffers, atomically; it is on disk when this returns.

    Whoever else writes the same file meanwhile, each writes one of its own.  If that fails, the room is given back.

    Args:
        path: the file.
        parts: what it is to hold.
        name_too: without it, the name is on disk only when the directory is synced.
        tag: of the claim in whose name it is written, in the name of the temporary file.
        check: is called when all is written, right before the file gets its name, and may raise.
    """
    temporary = temporary_of(path, tag)
    try:
        with open(temporary, "wb", buffering=0) as file:
            for part in parts:
                _write_all(file, memoryview(part))
            os.fsync(file.fileno())
        if check is not None:
            check()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if name_too:
        sync_directory(path.parent)


def temporary_of(path: Path, tag: str = "") -> Path:
    """Where this thread writes a file before it gets its name."""
    own = f"{os.getpid()}-{threading.get_ident():x}.tmp"
    return path.with_name(f".{path.name}.{tag}.{own}" if tag else f".{path.name}.{own}")


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(file, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]
