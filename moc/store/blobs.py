"""Files read by byte ranges, local or remote."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Protocol

from moc.files.tree import Tree


class Blob(Protocol):
    """A file that is immutable while it is read."""

    name: str
    """Name in messages."""
    size: int
    """Size in bytes."""

    def read(self, start: int, stop: int) -> memoryview:
        """Returns the bytes [start, stop); writing into them does not change the file."""
        ...

    def will_read(self, start: int, stop: int) -> None:
        """Hints that the bytes [start, stop) will be read soon."""


_PIECE = 4 << 20  # bytes read ahead at once


class LocalBlob:
    """A memory-mapped local file: ranges are read without a copy.

    Args:
        path: the file.
        in_memory: the file is in a memory file system, so reading ahead is skipped.
        descriptor: a descriptor of the file, which the blob takes over; by default the path is opened.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, in_memory: bool = False, descriptor: int | None = None):
        self.name, self._in_memory = str(path), in_memory
        descriptor = Tree(path.parent).open(path.name) if descriptor is None else descriptor
        self._file = open(descriptor, "rb", buffering=0)  # stays open for reading ahead
        self.size = os.fstat(self._file.fileno()).st_size
        self._bytes = memoryview(b"")
        if self.size:  # private and writable, as torch expects of tensors; pages are copied only on write
            mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
            mapped.madvise(mmap.MADV_SEQUENTIAL)
            self._bytes = memoryview(mapped)

    def read(self, start: int, stop: int) -> memoryview:
        """See :class:`Blob`."""
        return self._bytes[start:stop]

    def will_read(self, start: int, stop: int) -> None:
        """Reads the range into the page cache; blocks, but releases the GIL.

        ``madvise`` would be cheaper, but reads less far ahead than a disk needs.
        """
        if self._in_memory:
            return
        scratch = memoryview(bytearray(min(_PIECE, stop - start)))
        for position in range(start, stop, _PIECE):
            os.preadv(self._file.fileno(), [scratch[: stop - position]], position)
