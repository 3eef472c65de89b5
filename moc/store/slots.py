"""Files in a memory file system that are written again and again, so that no page is asked for anew."""

from __future__ import annotations

import os
from pathlib import Path


def reserve(path: Path, nbytes: int) -> int:
    """Makes a file of which all memory is in place: whoever writes to it later cannot run out.

    Args:
        path: it must not exist.
        nbytes: its size.

    Returns:
        A descriptor to read and write it.

    Raises:
        OSError: there is not so much memory; then there is no file either.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, max(nbytes, 1))
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def free_slot(directory: Path, name: str, nbytes: int) -> Path:
    """A file that may be written to, of at least so many bytes: one that has no other name, or a new one.

    What is in it counts when the file gets another name, by which it is found; it is free again when that is removed.

    Args:
        directory: of the slots.
        name: what is written; slots of one name are written in turn.
        nbytes: how much.

    Raises:
        OSError: there is not so much memory.
    """
    taken = set()
    for path in sorted(directory.glob(f"{name}.*")):
        status = path.stat()
        if status.st_nlink > 1:
            taken.add(path)
        elif status.st_size >= nbytes:
            return path
        else:
            path.unlink()
    number = next(number for number in range(len(taken) + 1) if directory / f"{name}.{number}" not in taken)
    os.close(reserve(path := directory / f"{name}.{number}", nbytes))
    return path
