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
        self._file = open(path, "rb", buffering=0)  # as long as anybody may want to read ahead
        self.size = os.fstat(self._file.fileno()).st_size
        self._bytes = memoryview(self._map() if self.size else b"")

    def read(self, start: int, stop: int) -> memoryview:
        """See :class:`Blob`."""
        return self._bytes[start:stop]

    def will_read(self, start: int, stop: int) -> None:
        """Lets the kernel read ahead; may take a while, but not the interpreter's lock."""
        os.posix_fadvise(self._file.fileno(), start, stop - start, os.POSIX_FADV_WILLNEED)

    def _map(self) -> mmap.mmap:
        # private and writable: torch wants tensors to be, and nothing is copied unless somebody writes
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        return mapped
