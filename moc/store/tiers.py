"""Locations of the memory tier: this node's directories of named shared memory."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

import xxhash

from moc.output import print_once
from moc.store.claims import Claim
from moc.store.errors import CheckpointError
from moc.store.locate import place_of
from moc.store.runs import run_of
from moc.store.storage import LocalPlace

SOCKETS = ".sockets"
"""Name of the directory in a user's memory for the sockets of running jobs (:mod:`moc.runtime.socket_directory`).

No run has this name, since the directory of a run ends with two numbers.
"""

_OF_NODE = "-node-"
_MOST_HOMES = 100  # names that are tried, since other users can make directories under them


def memory_place(
    memory_dir: str | Path, job: str, run: str, node: str | None = None, claim: Claim | None = None
) -> LocalPlace:
    """Returns this node's memory for a run: a directory of shared memory that outlives processes, not the machine.

    The directory name contains the run's name, so that no job finds the memory of another run.  The checkpoint
    directory may have been recreated, and containers that share the memory may use one path for different directories.

    Args:
        memory_dir: memory file system, usually ``/dev/shm``.
        job: directory or URL of the checkpoints.
        run: name of their run (:mod:`moc.store.runs`).
        node: name of the node, unique among nodes that share the file system; None if each machine is one node.
        claim: claim under which files are written.

    Raises:
        CheckpointError: the directory cannot be made, or belongs to another user.
    """
    root = memory_of_run(memory_dir, job, run)
    return LocalPlace(root if node is None else _of_node(root, node), in_memory=True, claim=claim)


def memory_of_run(memory_dir: str | Path, job: str, run: str) -> Path:
    """Returns the path of a run's memory on every node; nodes that share a file system add their name.

    Arguments and errors as for :func:`memory_place`.
    """
    return memory_home(memory_dir) / f"{_common_name(job)}{run}"


def memory_of_node(run: Path, node: str) -> list[Path]:
    """Returns the possible directories of a run's memory (:func:`memory_of_run`) on a node, existing or not."""
    return [run, _of_node(run, node)]


def is_memory_of_run(path: Path, run: Path) -> bool:
    """Returns whether a directory is a run's memory (:func:`memory_of_run`) on any node, in any home of the user."""
    return path.name == run.name or path.name.startswith(f"{run.name}{_OF_NODE}")


def memory_of_other_runs(memory_dir: str | Path, job: str, run: str) -> list[Path]:
    """Returns the memory left on this machine by other runs with the same checkpoint address."""
    name = _common_name(job)
    found = sorted(path for home in memory_homes(memory_dir) for path in home.iterdir() if path.name.startswith(name))
    return [path for path in found if not is_memory_of_run(path, Path(f"{name}{run}"))]


def memory_found(memory_dir: str | Path, job: str, node: str | None = None) -> LocalPlace:
    """Returns the memory of the run at a checkpoint address (:func:`memory_place`), for a program outside of the job.

    Raises:
        CheckpointError: no run has begun there.
    """
    run = run_of(place_of(job))
    if run is None:
        raise CheckpointError(
            f"no run has begun in {job}. Fix: name the directory or URL of its checkpoints", code="run-unknown"
        )
    return memory_place(memory_dir, job, run.run, node)


def memory_home(memory_dir: str | Path) -> Path:
    """Returns the parent directory of a user's jobs in a memory file system: ``moc-UID``, or ``moc-UID-1`` to ``-99``.

    It is the first of these that is a directory of this user with mode 0700; if there is none, the first that can be
    made.  So another user cannot block a job by making ``moc-UID``, nor hide snapshots by removing it later.  Launchers
    and the first worker of each node print a name other than the first.

    Raises:
        CheckpointError: all names are taken, or nothing can be made there.
    """
    homes = _homes(memory_dir)
    try:
        home = next(filter(_is_own, homes), None) or next(filter(_can_be_made, homes), None)
    except OSError as error:
        raise CheckpointError(
            f"{homes[0]} cannot be used for snapshots ({error.strerror}). Fix: name a memory file system with "
            "--ckpt-memory-dir",
            code="memory-directory-unusable",
        ) from None
    if home is None:
        raise CheckpointError(
            f"{homes[0]} is not a directory that only its owner, this user, can use, nor are {homes[1].name} to "
            f"{homes[-1].name}. Fix: remove it, or name another memory file system with --ckpt-memory-dir",
            code="memory-directory-unusable",
        )
    if home != homes[0]:
        print_once(f"{homes[0]} is not a directory that only this user can use: its jobs use {home}")
    return home


def memory_homes(memory_dir: str | Path) -> list[Path]:
    """Returns all candidates of :func:`memory_home`, in its order; several if two jobs raced for a name.

    Raises:
        CheckpointError: as :func:`memory_home`.
    """
    memory_home(memory_dir)
    return [home for home in _homes(memory_dir) if _is_own(home)]


def _homes(memory_dir: str | Path) -> list[Path]:
    name = f"moc-{os.geteuid()}"
    return [Path(memory_dir) / f"{name}{f'-{number}' * bool(number)}" for number in range(_MOST_HOMES)]


def _is_own(home: Path) -> bool:
    """Returns whether a path is a directory that only this user can use."""
    with suppress(FileNotFoundError):
        status = home.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return False


def _can_be_made(home: Path) -> bool:
    """Makes a directory unless the name is taken; returns whether it is this user's now."""
    with suppress(FileExistsError):
        home.mkdir(mode=0o700)
    return _is_own(home)


def _common_name(job: str) -> str:
    whole = job.rstrip("/") if "://" in job else os.path.abspath(job)
    return f"{os.path.basename(whole)}-{xxhash.xxh3_64_hexdigest(whole.encode())}-"


def _of_node(run: Path, node: str) -> Path:
    return run.with_name(f"{run.name}{_OF_NODE}{node}")
