"""Reserves memory in a memory file system: reusable files for snapshots.

The pages of these files are allocated once, so later writes cannot run out of memory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from moc.files.safe_directory import remove_owned

SLOTS_DIRECTORY = "slots"
"""Name of the directory of these files in a memory location."""


def allocate_file(path: Path, nbytes: int) -> int:
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
        remove_owned(path)
        raise
    return descriptor


def find_free_file(directory: Path, name: str, nbytes: int) -> Path:
    """Returns a free file of at least ``nbytes`` bytes: one without a second hard link, or a new one.

    A slot is in use while a second hard link publishes its contents, and free again once that link is removed.  The
    smallest free one that fits is used; if all are too small, the largest is removed.

    Raises:
        OSError: memory is insufficient.
    """
    sizes = _reusable_files(directory, name)
    free = {path: size for path, size in sizes.items() if path.lstat().st_nlink == 1}
    smallest = min((path for path, size in free.items() if size >= nbytes), key=lambda path: free[path], default=None)
    if smallest is not None:
        return smallest
    largest = max(free, key=lambda path: free[path], default=None)
    if largest is not None:  # too small: it makes room
        remove_owned(largest)
        del sizes[largest]
    return _create_reusable_file(directory, name, sizes, nbytes)


def reserve_files(directory: Path, name: str, sizes: Iterable[int], removes_others: bool = False) -> None:
    """Makes files, so that each of the sizes in bytes has a separate file, free or in use.

    With ``removes_others``, other free files are removed first; no other process may then be writing into one.

    Raises:
        OSError: memory is insufficient.
    """
    present = _reusable_files(directory, name)
    unused, missing = dict(present), []
    for nbytes in sorted(sizes, reverse=True):
        largest = max(unused, key=lambda path: unused[path], default=None)
        if largest is not None and unused[largest] >= nbytes:
            del unused[largest]
        else:
            missing.append(nbytes)
    for path in unused if removes_others else ():
        if path.lstat().st_nlink == 1:  # it makes room
            remove_owned(path)
            del present[path]
    for nbytes in missing:
        present[_create_reusable_file(directory, name, present, nbytes)] = nbytes


def _reusable_files(directory: Path, name: str) -> dict[Path, int]:
    """Returns the sizes of the slots of a name; removes entries that are not regular files."""
    sizes = {}
    for path in sorted(directory.glob(f"{name}.*")):
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            sizes[path] = status.st_size
        else:
            remove_owned(path)
    return sizes


def _create_reusable_file(directory: Path, name: str, taken: Collection[Path], nbytes: int) -> Path:
    for number in itertools.count():
        path = directory / f"{name}.{number}"
        if path not in taken:
            with contextlib.suppress(FileExistsError):  # another process has made it meanwhile
                os.close(allocate_file(path, nbytes))
                break
    return path
