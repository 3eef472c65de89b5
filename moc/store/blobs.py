"""Files that are read by ranges of bytes, wherever they are."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Protocol


class Blob(Protocol):
    """A file that does not change while it is read."""

    name: str
    """What to call it in a message."""
    size: int
    """Its bytes."""

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes [start, stop), writable without changing the file."""

    def will_read(self, start: int, stop: int) -> None:
        """Says that these bytes will be read soon."""


class LocalBlob:
    """A file of this machine, mapped: ranges are read without a copy.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path):
        self.name = str(path)
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            # private and writable: torch wants tensors to be, and nothing is copied unless somebody writes
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.size else None
        self._bytes = memoryview(self._map if self._map is not None else b"")

    def read(self, start: int, stop: int) -> memoryview:
        """See :class:`Blob`."""
        return self._bytes[start:stop]

    def will_read(self, start: int, stop: int) -> None:
        """Lets the kernel read ahead."""
        if self._map is not None and stop > start:
            begin = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_WILLNEED, begin, stop - begin)
