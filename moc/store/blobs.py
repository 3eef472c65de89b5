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
        ...

    def will_read(self, start: int, stop: int) -> None:
        """Says that these bytes will be read soon."""


_PIECE = 4 << 20  # bytes read ahead at once


class LocalBlob:
    """A file of this machine, mapped: ranges are read without a copy.

    Args:
        path: the file.
        in_memory: it is in memory anyway, so nothing is gained by reading ahead.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, in_memory: bool = False):
        self.name, self._in_memory = str(path), in_memory
        self._file = open(path, "rb", buffering=0)  # as long as anybody may want to read ahead
        self.size = os.fstat(self._file.fileno()).st_size
        self._bytes = memoryview(self._map() if self.size else b"")

    def read(self, start: int, stop: int) -> memoryview:
        """See :class:`Blob`."""
        return self._bytes[start:stop]

    def will_read(self, start: int, stop: int) -> None:
        """Reads, so that the kernel has it in its cache; takes a while, but not the interpreter's lock.

        Advice to the kernel would be cheaper, but it reads less far ahead than a disk needs.
        """
        if self._in_memory:
            return
        scratch = memoryview(bytearray(min(_PIECE, stop - start)))
        for position in range(start, stop, _PIECE):
            os.preadv(self._file.fileno(), [scratch[: stop - position]], position)

    def _map(self) -> mmap.mmap:
        # private and writable: torch wants tensors to be, and nothing is copied unless somebody writes
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        return mapped
