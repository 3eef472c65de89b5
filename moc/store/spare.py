"""Reserves memory for small files, so that a full memory file system does not stop their writers."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from moc.files.tree import RefusedFileError, open_single, remove_own

NAME = ".spare"
"""Name of the file in a directory of a node's memory."""

_PAGE = 4096


class SpareRoom:
    """A file whose pages are released for small files when the file system is full; shared by a node's processes.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path):
        self._path = path

    def fill(self, nbytes: int) -> None:
        """Extends the allocation to ``nbytes`` bytes.

        Any other entry with the file's name, such as a link, is replaced by a new file.

        Raises:
            OSError: the file system has too little room.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.close(open_single(self._path, os.O_RDWR))
        except FileNotFoundError:
            pass
        except RefusedFileError:
            remove_own(self._path)
        with self._opened(os.O_CREAT) as file:
            if os.fstat(file).st_size < nbytes:
                os.posix_fallocate(file, 0, nbytes)

    def spend(self, nbytes: int) -> bool:
        """Releases pages for a file of ``nbytes`` bytes; returns False, and releases nothing, if there are too few."""
        pages = (-(-nbytes // _PAGE) + 1) * _PAGE
        with contextlib.suppress(OSError), self._opened() as file:
            left = os.fstat(file).st_size - pages
            if left >= 0:
                os.ftruncate(file, left)
                return True
        return False

    @contextlib.contextmanager
    def _opened(self, flags: int = 0) -> Iterator[int]:
        file = open_single(self._path, os.O_RDWR | flags)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)
