"""Files of logs: the tensors that one rank has kept of one iteration, by key, with hashes.

A file has its name when it is whole.  It is one of regions, as those of snapshots are (``docs/reference/format.md``):
an entry is named by its iteration, its slot is the key, and its box is the whole tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from moc.state.region import Region
from moc.store.blobs import LocalBlob
from moc.store.errors import DamagedRegionError, MissingRegionError
from moc.store.regions import Entry, FileLayout, Source, read_sources

_FILE = re.compile(r"^iter_(\d{10})\.safetensors$")


class LogEntry(NamedTuple):
    """A tensor that is logged in every iteration, or in some.

    Attributes:
        key: tells it from the others of an iteration.
        shape: of the tensor.
        dtype: of the tensor.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def directory_of(root: Path, rank: int, kind: str = "logs") -> Path:
    """The logs of a rank, in the memory of its node for this job; those of another kind are elsewhere."""
    return root / kind / f"rank_{rank:05d}"


def path_of(directory: Path, iteration: int) -> Path:
    """The log of an iteration, when it is whole."""
    return directory / f"iter_{iteration:010d}.safetensors"


def iterations_in(directory: Path) -> list[int]:
    """Iterations of which there is a log, ascending."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(match[1]) for match in map(_FILE.match, names) if match)


def layout_of(iteration: int, entries: Iterable[LogEntry]) -> FileLayout:
    """Where everything stands in the log of an iteration; of the same size for all iterations.

    Args:
        iteration: which, counted from 1.
        entries: what it holds; the slots of the layout are their keys, in an order of its own.
    """
    name = _name(iteration)
    return FileLayout(Entry(name, key, shape, Region((0,) * len(shape), shape), dtype) for key, shape, dtype in entries)


class LogReader:
    """Reads what a rank has logged, also after that rank is gone.

    Args:
        directory: its logs, see :func:`directory_of`.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._opened: tuple[int | None, dict[tuple[str, str], Source]] = None, {}

    def iterations(self) -> list[int]:
        """Iterations of which there is a log, ascending; one that is being written is none."""
        return iterations_in(self._directory)

    def read(self, iteration: int, key: str) -> torch.Tensor:
        """What was logged, on the host, in its shape; not to be changed.

        Raises:
            MissingRegionError: it is not there.
            DamagedRegionError: it is not what was written.
        """
        source = self._entries(iteration).get((_name(iteration), key))
        if source is None:
            raise MissingRegionError(
                f"{path_of(self._directory, iteration)} holds no {key}: it was not logged, or is of another layout"
            )
        if damage := source.damage():
            raise DamagedRegionError(damage)
        return source.values()

    def _entries(self, iteration: int) -> dict[tuple[str, str], Source]:
        if self._opened[0] != iteration:
            path = path_of(self._directory, iteration)
            try:
                sources = read_sources(LocalBlob(path, in_memory=True))
            except OSError:
                raise MissingRegionError(f"{path} is not there: iteration {iteration} was not logged") from None
            self._opened = iteration, {(one.entry.name, one.entry.slot): one for one in sources}
        return self._opened[1]


def _name(iteration: int) -> str:
    return f"iteration {iteration:010d}"
