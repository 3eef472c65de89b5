"""Durable writes of small files and names on a local disk."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path


def write_durably(path: Path, text: str, tag: str = "", check: Callable[[], None] | None = None) -> None:
    """Replaces a small file atomically and durably.  Arguments as in :func:`write_parts_durably`."""
    write_parts_durably(path, [text.encode()], tag=tag, check=check)


def write_parts_durably(
    path: Path, parts: Iterable, name_too: bool = True, tag: str = "", check: Callable[[], None] | None = None
) -> None:
    """Replaces a file atomically and durably by the concatenation of buffers.

    Concurrent writers of the same file use separate temporary files.  On failure, the temporary file is removed.

    Args:
        path: the file.
        parts: buffers to write.
        name_too: sync the directory too; without it, the name is durable only at the next sync.
        tag: tag of the writer's claim, part of the temporary file's name.
        check: called after the write, right before the rename; may raise.
    """
    temporary = temporary_of(path, tag)
    try:
        with open(new_file(temporary), "wb", buffering=0) as file:
            for part in parts:
                data = memoryview(part)
                while data:
                    data = data[file.write(data) :]
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
    """A new name for a file before the rename, which nobody can foresee and plant a link at."""
    own = f"{secrets.token_hex(8)}.tmp"
    return path.with_name(f".{path.name}.{tag}.{own}" if tag else f".{path.name}.{own}")


def new_file(path: Path) -> int:
    """Makes a file, and returns its descriptor; never opens what is there, nor follows a link.

    Raises:
        FileExistsError: something has the name.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def sync_directory(path: Path) -> None:
    """Syncs the names in a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
