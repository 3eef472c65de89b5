"""What jobs have left in this machine's memory: whose it is, how much, and whether a process still uses it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from moc.store.errors import CheckpointError
from moc.store.fence import lives
from moc.store.runs import run_of
from moc.store.storage import LocalPlace
from moc.store.store import Store
from moc.store.tiers import memory_home, memory_of_node


@dataclass(frozen=True)
class Leftover:
    """One node's memory for a run.

    Attributes:
        path: its directory.
        run: what the run is called; None where the directory does not say.
        address: where its checkpoints are, as the job saw it.
        newest: iteration of the newest snapshot; None if there is none.
        bytes: memory that it takes.
        used_by: processes of this user that use it, as far as they can be seen from here.
    """

    path: Path
    run: str | None
    address: str | None
    newest: int | None
    bytes: int
    used_by: tuple[int, ...]


def leftovers(memory_dir: str | Path) -> list[Leftover]:
    """All that this user's jobs have in a memory file system, those that run included.

    Raises:
        CheckpointError: the directory belongs to somebody else.
    """
    return [leftover(path) for path in sorted(memory_home(memory_dir).iterdir()) if path.is_dir()]


def leftover(path: Path) -> Leftover:
    """What there is to know of one directory."""
    place = LocalPlace(path, in_memory=True)
    try:
        run = run_of(place)
    except (CheckpointError, OSError):
        run = None
    newest = max(Store(place, slack=True).iterations(), default=None)
    told = (run.run, run.address) if run is not None else (None, None)
    return Leftover(path, *told, newest, _bytes(path), tuple(_users(path)))


def remove_leftover(one: Leftover) -> None:
    """Gives the memory back.

    Raises:
        CheckpointError: a process uses it.
        OSError: it cannot be removed.
    """
    if users := tuple(_users(one.path)):
        raise CheckpointError(f"{one.path} is used by process {users[0]}: stop that job first")
    shutil.rmtree(one.path)


def give_back(run: Path, node: str) -> None:
    """Removes what a run has left in a node's memory, where nobody needs it any more; not what a process uses.

    Args:
        run: as of :func:`moc.store.tiers.memory_of_run`.
        node: the same as of :func:`moc.store.tiers.memory_of_node`.

    Raises:
        CheckpointError: this is no memory of a run.
        OSError: it cannot be removed.
    """
    there = [path for path in memory_of_node(run, node) if path.is_dir()]
    if there and run.parent != memory_home(run.parent.parent):
        raise CheckpointError(f"{run} is no memory of a run")
    for path in there:
        if not any(_users(path)):  # else the run goes on there already, or another node of this machine is not done
            shutil.rmtree(path)


def _bytes(path: Path) -> int:
    """What its files take; one with several names counts once."""
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
    """Who has the place, and whoever has a buffer of it in its memory.

    The one that has the place may be lost just now, and its job go on; and in another container only its lock shows.
    """
    try:
        owner = lives(path)
    except CheckpointError:
        owner = None
    if owner is not None:
        yield owner.pid
    inside = f" {os.path.realpath(path)}/"
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal() or (owner is not None and int(process.name) == owner.pid):
            continue
        try:
            if inside in (process / "maps").read_text(errors="replace"):
                yield int(process.name)
        except OSError:  # it has ended, or is somebody else's
            continue
