"""Retains buffers across generations, because allocating gigabytes and pinning them for CUDA takes seconds.

A buffer in a memory file system may contain a snapshot, which a second hard link commits. After the run has resumed,
this buffer belongs to the snapshot's slot again. It is free only when no other name exists.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from moc.store.buffers import HostBuffer


class KeptBuffers:
    """Buffers of one worker between generations; not thread-safe."""

    def __init__(self):
        self._kept: list[HostBuffer] = []

    def keep(self, buffers: Iterable[HostBuffer]) -> None:
        """Takes over buffers that no thread reads or writes."""
        self._kept.extend(buffers)

    @property
    def paths(self) -> set[Path]:
        """Files of the buffers."""
        return {buffer.path for buffer in self._kept if buffer.path is not None}

    def drop_others(self, name: str) -> None:
        """Frees buffers whose files are not named after ``name``, such as buffers of this worker's previous rank."""
        others = [buffer for buffer in self._kept if buffer.path is not None and buffer.path.stem != name]
        for buffer in others:
            self._kept.remove(buffer)
            buffer.close()

    def published_as(self, file: Path) -> HostBuffer | None:
        """Removes and returns the buffer that is also named ``file``, if there is one."""
        return self._give(next((one for one in self._kept if _is_same(one.path, file)), None))

    def take(self, nbytes: int, directory: Path | None) -> HostBuffer | None:
        """Removes and returns the smallest free buffer of at least ``nbytes`` bytes in a directory.

        Without a directory (None), the buffer is anonymous memory. If all are too small, it frees the largest, to make
        room, and returns None.
        """
        free = sorted(
            (one for one in self._kept if (one.path and one.path.parent) == directory and _is_free(one)),
            key=lambda one: one.nbytes,
        )
        fitting = next((one for one in free if one.nbytes >= nbytes), None)
        if fitting is None and free:
            self._kept.remove(free[-1])
            free[-1].close()
        return self._give(fitting)

    def trim(self, most: int) -> None:
        """Frees all but ``most`` buffers, unavailable ones first, then the smallest; committed files remain."""
        order = sorted(self._kept, key=lambda one: (not _is_free(one), -one.nbytes))
        self._kept, over = order[:most], order[most:]
        for buffer in over:
            buffer.close()

    def _give(self, buffer: HostBuffer | None) -> HostBuffer | None:
        if buffer is not None:
            self._kept.remove(buffer)
        return buffer


def _is_free(buffer: HostBuffer) -> bool:
    if buffer.path is None:
        return True
    try:
        return buffer.path.stat().st_nlink == 1
    except OSError:  # it was removed, so nothing could be committed from it
        return False


def _is_same(path: Path | None, file: Path) -> bool:
    try:
        return path is not None and os.path.samefile(path, file)
    except OSError:
        return False
