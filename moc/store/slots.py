"""Reusable files in a memory file system, whose pages are allocated once."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from moc.files.tree import remove_own


def reserve(path: Path, nbytes: int) -> int:
    """Makes a fully allocated file, so that later writes cannot run out of memory; returns its descriptor.

    Raises:
        OSError: memory is insufficient; no file is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, max(nbytes, 1))
    except OSError:
        os.close(descriptor)
        remove_own(path)
        raise
    return descriptor


def free_slot(directory: Path, name: str, nbytes: int) -> Path:
    """A free file of at least ``nbytes`` bytes: one without a second hard link, or a new one.

    A slot is in use while a second hard link publishes its contents, and free again once that link is removed.  The
    slots of one name in a directory are used in turn.

    Raises:
        OSError: memory is insufficient.
    """
    taken = set()
    for path in sorted(directory.glob(f"{name}.*")):
        status = path.lstat()
        if status.st_nlink > 1:
            taken.add(path)
        elif status.st_size >= nbytes and stat.S_ISREG(status.st_mode):
            return path
        else:
            remove_own(path)
    number = next(number for number in range(len(taken) + 1) if directory / f"{name}.{number}" not in taken)
    os.close(reserve(path := directory / f"{name}.{number}", nbytes))
    return path
