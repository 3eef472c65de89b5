"""Where the tiers are: this node's memory and the storage of the job."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import xxhash

from moc.store.claims import Claim
from moc.store.errors import CheckpointError
from moc.store.locate import place_of
from moc.store.runs import run_of
from moc.store.storage import LocalPlace

_OF_NODE = "-node-"


def memory_place(
    memory_dir: str | Path, job: str, run: str, node: str | None = None, claim: Claim | None = None
) -> LocalPlace:
    """This node's memory for a run: a directory of named shared memory, which outlives processes but not the machine.

    Its name has the run's, so that nobody finds the memory of another run, be it that the directory of checkpoints was
    removed and made anew, or that containers which share the memory call different directories by one path.

    Args:
        memory_dir: a memory file system, as a rule ``/dev/shm``.
        job: the directory or URL of the checkpoints.
        run: the name of the run that is there (:mod:`moc.store.runs`).
        node: what tells nodes apart that share the file system; None where each machine is one.
        claim: in whose name files are written there.

    Raises:
        CheckpointError: it cannot be made, or belongs to somebody else.
    """
    root = memory_of_run(memory_dir, job, run)
    return LocalPlace(root if node is None else _of_node(root, node), in_memory=True, claim=claim)


def memory_of_run(memory_dir: str | Path, job: str, run: str) -> Path:
    """What all nodes call a run's memory, each its own; where several share the file system, the node is added.

    Args:
        memory_dir: as of :func:`memory_place`.
        job: the same.
        run: the same.

    Raises:
        CheckpointError: as of :func:`memory_place`.
    """
    return memory_home(memory_dir) / f"{_common_name(job)}{run}"


def memory_of_node(run: Path, node: str) -> list[Path]:
    """Where a node may have what a run needs, be it there or not.

    Args:
        run: as of :func:`memory_of_run`.
        node: what tells the node from others that share the file system.
    """
    return [run, _of_node(run, node)]


def memory_of_other_runs(memory_dir: str | Path, job: str, run: str) -> list[Path]:
    """What runs have left in this machine's memory of which the checkpoints were at the same address.

    Args:
        memory_dir: as of :func:`memory_place`.
        job: the same.
        run: the one that is meant to be there.
    """
    name = _common_name(job)
    found = sorted(path for path in memory_home(memory_dir).iterdir() if path.name.startswith(name))
    return [path for path in found if not _is_of(path.name, name, run)]


def memory_found(memory_dir: str | Path, job: str, node: str | None = None) -> LocalPlace:
    """The memory of the run whose checkpoints are at an address, for a program that is not of the job.

    Args:
        memory_dir: as of :func:`memory_place`.
        job: the same.
        node: the same.

    Raises:
        CheckpointError: no run has begun there.
    """
    run = run_of(place_of(job))
    if run is None:
        raise CheckpointError(f"no run has begun in {job}: name the directory or URL of its checkpoints")
    return memory_place(memory_dir, job, run.run, node)


def memory_home(memory_dir: str | Path) -> Path:
    """Where this user's jobs have their directories in a memory file system.

    Raises:
        CheckpointError: it cannot be made, or belongs to somebody else.
    """
    home = Path(memory_dir) / f"moc-{os.geteuid()}"
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        status = home.lstat()
    except OSError as error:
        raise CheckpointError(
            f"{home} cannot be used for snapshots ({error.strerror}): name a memory file system with --ckpt-memory-dir"
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise CheckpointError(
            f"{home} is not a directory that only its owner, this user, can use: remove it, or name another memory "
            "file system with --ckpt-memory-dir"
        )
    return home


def _common_name(job: str) -> str:
    whole = job.rstrip("/") if "://" in job else os.path.abspath(job)
    return f"{os.path.basename(whole)}-{xxhash.xxh3_64_hexdigest(whole.encode())}-"


def _of_node(run: Path, node: str) -> Path:
    return run.with_name(f"{run.name}{_OF_NODE}{node}")


def _is_of(directory: str, name: str, run: str) -> bool:
    return directory == f"{name}{run}" or directory.startswith(f"{name}{run}{_OF_NODE}")
