"""Reads and lays out log files: the tensors that one rank logged in one iteration, by key, with hashes.

A file gets its name when it is complete.  It is a region file, like snapshot files (``docs/reference/format.md``).  The
name of an entry is its iteration, its slot the key, and its region the full tensor.
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
    """Tensor that is logged in every iteration, or in some; the key identifies it within an iteration."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def directory_of(root: Path, rank: int, kind: str = "logs") -> Path:
    """Returns the directory of a rank's logs in its node's memory for this job; each kind has its own."""
    return root / kind / f"rank_{rank:05d}"


def path_of(directory: Path, iteration: int) -> Path:
    """Returns the path of an iteration's complete log."""
    return directory / f"iter_{iteration:010d}.safetensors"


def iterations_in(directory: Path) -> list[int]:
    """Returns the logged iterations, ascending."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(match[1]) for match in map(_FILE.match, names) if match)


def layout_of(iteration: int, entries: Iterable[LogEntry]) -> FileLayout:
    """Returns the layout of an iteration's log; its size is equal for all iterations with the same entries.

    The keys of the entries are the slots of the layout, which has its own order.
    """
    name = _name(iteration)
    return FileLayout(Entry(name, key, shape, Region((0,) * len(shape), shape), dtype) for key, shape, dtype in entries)


class LogReader:
    """Reader of a rank's logs, which also works after that rank has ended."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._opened: tuple[int | None, dict[tuple[str, str], Source]] = None, {}

    def iterations(self) -> list[int]:
        """Returns the iterations with a complete log, ascending."""
        return iterations_in(self._directory)

    def read(self, iteration: int, key: str) -> torch.Tensor:
        """Returns a logged tensor on the host, in its shape; callers must not change it.

        Raises:
            MissingRegionError: it was not logged.
            DamagedRegionError: its hash does not match.
        """
        source = self._entries(iteration).get((_name(iteration), key))
        if source is None:
            raise MissingRegionError(
                f"{path_of(self._directory, iteration)} does not hold {key}. Fix: resume from a snapshot, "
                "with the layout that wrote the log",
                code="log-missing",
            )
        if damage := source.damage():
            raise DamagedRegionError(f"{damage}. Fix: resume from a snapshot")
        return source.values()

    def _entries(self, iteration: int) -> dict[tuple[str, str], Source]:
        if self._opened[0] != iteration:
            path = path_of(self._directory, iteration)
            try:
                sources = read_sources(LocalBlob(path, in_memory=True))
            except OSError:
                raise MissingRegionError(
                    f"{path} does not exist: iteration {iteration} was not logged. Fix: resume from a snapshot",
                    code="log-missing",
                ) from None
            self._opened = iteration, {(one.entry.name, one.entry.slot): one for one in sources}
        return self._opened[1]


def _name(iteration: int) -> str:
    return f"iteration {iteration:010d}"
