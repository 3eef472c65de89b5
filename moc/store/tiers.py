"""Locations of the memory tier: this node's directories of named shared memory."""

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

    The directory name contains the run's, so that no job finds the memory of another run: the checkpoint directory may
    have been recreated, and containers that share the memory may use one path for different directories.

    Args:
        memory_dir: memory file system, usually ``/dev/shm``.
        job: directory or URL of the checkpoints.
        run: name of their run (:mod:`moc.store.runs`).
        node: name of the node among those that share the file system; None if each machine is one node.
        claim: claim under which files are written.

    Raises:
        CheckpointError: the directory cannot be made, or belongs to another user.
    """
    root = memory_of_run(memory_dir, job, run)
    return LocalPlace(root if node is None else _of_node(root, node), in_memory=True, claim=claim)


def memory_of_run(memory_dir: str | Path, job: str, run: str) -> Path:
    """The path of a run's memory on every node; nodes that share a file system add their name.

    Arguments and errors are those of :func:`memory_place`.
    """
    return memory_home(memory_dir) / f"{_common_name(job)}{run}"


def memory_of_node(run: Path, node: str) -> list[Path]:
    """The possible directories of a run's memory (:func:`memory_of_run`) on a node, existing or not."""
    return [run, _of_node(run, node)]


def memory_of_other_runs(memory_dir: str | Path, job: str, run: str) -> list[Path]:
    """The memory left on this machine by other runs with the same checkpoint address."""
    name = _common_name(job)
    found = sorted(path for path in memory_home(memory_dir).iterdir() if path.name.startswith(name))
    mine = f"{name}{run}"
    return [path for path in found if path.name != mine and not path.name.startswith(f"{mine}{_OF_NODE}")]


def memory_found(memory_dir: str | Path, job: str, node: str | None = None) -> LocalPlace:
    """The memory of the run at a checkpoint address (:func:`memory_place`), for a program outside of the job.

    Raises:
        CheckpointError: no run has begun there.
    """
    run = run_of(place_of(job))
    if run is None:
        raise CheckpointError(f"no run has begun in {job}: name the directory or URL of its checkpoints")
    return memory_place(memory_dir, job, run.run, node)


def memory_home(memory_dir: str | Path) -> Path:
    """The parent directory of this user's jobs in a memory file system.

    Raises:
        CheckpointError: the directory cannot be made, or belongs to another user.
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
