"""Leftovers of jobs in this machine's memory: their run, their size, and the processes that use them."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moc.files.tree import remove_own
from moc.store.errors import CheckpointError
from moc.store.fence import lives
from moc.store.leases import lease_left_s
from moc.store.locate import place_of
from moc.store.runs import run_of
from moc.store.slots import DIRECTORY
from moc.store.spare import NAME
from moc.store.storage import LocalPlace
from moc.store.store import Store
from moc.store.tiers import SOCKETS, is_memory_of_run, memory_homes, memory_of_node, memory_of_run


@dataclass(frozen=True)
class Leftover:
    """One node's memory for a run.

    Attributes:
        path: directory.
        run: name of the run; None if the directory does not record it.
        address: address of its checkpoints, as seen by the job.
        newest: iteration of the newest snapshot; None without one.
        bytes: memory used.
        used_by: processes of this user that use it, if visible from here.
    """

    path: Path
    run: str | None
    address: str | None
    newest: int | None
    bytes: int
    used_by: tuple[int, ...]


def leftovers(memory_dir: str | Path) -> list[Leftover]:
    """Returns all memory of this user's jobs in a memory file system, running ones included.

    Raises:
        CheckpointError: the directory cannot be made, or belongs to another user.
    """
    there = sorted(path for home in memory_homes(memory_dir) for path in home.iterdir())
    return [leftover(path) for path in there if _is_ours(path)]


def leftovers_of(memory_dir: str | Path, job: str) -> list[Leftover]:
    """Returns the memory of the run whose checkpoints are in a directory or URL, on all nodes that share this machine.

    Raises:
        CheckpointError: no run has begun there, or as :func:`leftovers`.
        OSError: the checkpoints' location cannot be read.
    """
    run = run_of(place_of(job))
    if run is None:
        raise CheckpointError(
            f"no run has begun in {job}. Fix: name the directory or URL of its checkpoints", code="run-unknown"
        )
    path = memory_of_run(memory_dir, job, run.run)
    return [one for one in leftovers(memory_dir) if is_memory_of_run(one.path, path)]


def _is_ours(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and path.name != SOCKETS


def leftover(path: Path) -> Leftover:
    """Describes one directory."""
    place = LocalPlace(path, in_memory=True)
    try:
        run = run_of(place)
    except OSError:
        run = None
    newest = max(Store(place, slack=True).iterations(), default=None)
    return Leftover(path, run and run.run, (run and run.address) or None, newest, _bytes(path), tuple(_users(path)))


def remove_leftover(one: Leftover, ended: bool = False) -> None:
    """Removes a leftover.

    Args:
        one: the leftover.
        ended: its job is known to have ended, so that its lease does not matter.

    Raises:
        CheckpointError: a process uses the memory, or the job's lease has not expired.
        OSError: it cannot be removed.
    """
    if users := tuple(_users(one.path)):
        raise CheckpointError(
            f"{one.path} is used by process {users[0]}. Fix: stop that job first", code="memory-in-use"
        )
    if not ended and (left_s := lease_left_s(one.path)) > 0:
        raise CheckpointError(
            f"{one.path} is of a job that was alive a moment ago and may continue. Fix: wait {math.ceil(left_s)} s, or "
            "give --ended if that job has ended",
            code="memory-in-use",
        )
    remove_own(one.path)


def give_back(run: Path, node: str) -> None:
    """Removes a finished run's leftovers from a node's memory (:mod:`moc.store.tiers`), except those in use.

    Raises:
        CheckpointError: the directory is not the memory of a run.
        OSError: it cannot be removed.
    """
    there = [path for path in memory_of_node(run, node) if path.is_dir()]
    if there and run.parent not in memory_homes(run.parent.parent):
        raise CheckpointError(
            f"{run} is not the memory of a run. Fix: name a directory that tools/clean_memory.py lists",
            code="memory-of-no-run",
        )
    for path in there:
        if not any(_users(path)):  # otherwise the run has resumed there, or another node of this machine is not done
            remove_own(path)


def give_back_unused(memory: Path) -> None:
    """Removes unused buffers from a run's memory on this node, and the memory itself if nothing else is in it.

    The job of this process must be about to end.  Snapshots, logs and files that cannot be removed stay.
    """
    with contextlib.suppress(OSError):
        for slot in memory.rglob(f"{DIRECTORY}/*"):
            if slot.lstat().st_nlink == 1:
                remove_own(slot)
        for spare in memory.rglob(NAME):
            remove_own(spare)
        if not any(path.is_file() and not path.name.startswith(".") for path in memory.rglob("*")):
            remove_own(memory)


def _bytes(path: Path) -> int:
    """Returns the number of bytes of the files; a file with several names counts once."""
    sizes = {}
    for file in path.rglob("*"):
        try:
            status = file.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _users(path: Path) -> Iterator[int]:
    """Yields the owner of the directory, and every process that maps one of its buffers.

    The owner may just have died while its job continues; in another container, only its lock is visible.
    """
    owner = lives(path)
    if owner is not None:
        yield owner.pid
    inside = f" {os.path.realpath(path)}/"
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or (owner is not None and int(process.name) == owner.pid):
            continue
        try:
            if inside in (process / "maps").read_text(errors="replace"):
                yield int(process.name)
        except OSError:  # it has ended, or belongs to another user
            continue
