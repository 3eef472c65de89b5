"""Small files and names on a local disk, durable when the call returns."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replaces a small file atomically; it is on disk when this returns."""
    write_parts_durably(path, [text.encode()])


def write_parts_durably(path: Path, parts: Iterable, name_too: bool = True) -> None:
    """Replaces a file by the concatenation of some buffers, atomically; it is on disk when this returns.

    Args:
        path: the file.
        parts: what it is to hold.
        name_too: without it, the name is on disk only when the directory is synced.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb", buffering=0) as file:
        for part in parts:
            _write_all(file, memoryview(part))
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if name_too:
        sync_directory(path.parent)


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
