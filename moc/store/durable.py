"""Durable writes of small files and names on a local disk, by path."""

from __future__ import annotations

import os
from pathlib import Path

from moc.files.tree import Tree


def write_durably(path: Path, text: str) -> None:
    """Replaces a small file atomically and durably."""
    Tree(path.parent).write(path.name, [text.encode()])


def new_file(path: Path) -> int:
    """Makes a file, and returns its descriptor; never opens an existing file, nor follows a link.

    Raises:
        FileExistsError: the name exists.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def sync_directory(path: Path) -> None:
    """Syncs the names in a directory to disk."""
    Tree(path).sync()
