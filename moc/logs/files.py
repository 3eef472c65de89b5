"""Files of logs: what one rank sent in one iteration, with hashes; a file has its name when it is whole.

They are files of regions, as those of snapshots are (``docs/reference/format.md``): an entry is named by its iteration,
its slot by direction, chunk and micro batch, and its box is the whole tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from moc.logs.crossings import Crossing
from moc.state.region import Region
from moc.store.blobs import LocalBlob
from moc.store.errors import DamagedRegionError, MissingRegionError
from moc.store.regions import Entry, FileLayout, Source, read_sources

_FILE = re.compile(r"^iter_(\d{10})\.safetensors$")


def directory_of(root: Path, rank: int) -> Path:
    """The logs of a rank, in the memory of its node for this job."""
    return root / "logs" / f"rank_{rank:05d}"


def path_of(directory: Path, iteration: int) -> Path:
    """The log of an iteration, when it is whole."""
    return directory / f"iter_{iteration:010d}.safetensors"


def iterations_in(directory: Path) -> list[int]:
    """Iterations of which there is a log, ascending."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return sorted(int(match[1]) for match in map(_FILE.match, names) if match)


def layout_of(iteration: int, crossings: Iterable[Crossing], shape: tuple[int, ...], dtype: torch.dtype) -> FileLayout:
    """Where everything stands in the log of an iteration; of the same size for all iterations.

    Args:
        iteration: which, counted from 1.
        crossings: what is sent.
        shape: of each tensor.
        dtype: of each tensor.
    """
    name, region = _name(iteration), Region((0,) * len(shape), shape)
    return FileLayout(Entry(name, _slot(crossing), shape, region, dtype) for crossing in crossings)


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

    def read(self, iteration: int, crossing: Crossing) -> torch.Tensor:
        """What was sent, on the host, in its shape; not to be changed.

        Raises:
            MissingRegionError: it is not there.
            DamagedRegionError: it is not what was written.
        """
        source = self._entries(iteration).get((_name(iteration), _slot(crossing)))
        if source is None:
            raise MissingRegionError(
                f"{path_of(self._directory, iteration)} holds no {crossing.direction.value} tensor of micro batch "
                f"{crossing.micro_batch} and chunk {crossing.chunk}: it is of another layout"
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


def _slot(crossing: Crossing) -> str:
    return f"{crossing.direction.value} chunk {crossing.chunk} micro batch {crossing.micro_batch}"
