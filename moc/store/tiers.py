"""Where the tiers are: this node's memory and the storage of the job."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import xxhash

from moc.store.errors import CheckpointError
from moc.store.places import LocalPlace


def memory_place(memory_dir: str | Path, job: str, node: str | None = None) -> LocalPlace:
    """This node's memory for a job: a directory of named shared memory, which outlives processes but not the machine.

    Args:
        memory_dir: a memory file system, as a rule ``/dev/shm``.
        job: what tells jobs apart: the directory or URL of their checkpoints.
        node: what tells nodes apart that share the file system; None where each machine is one.

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
    whole = job.rstrip("/") if "://" in job else os.path.abspath(job)
    name = f"{os.path.basename(whole)}-{xxhash.xxh3_64_hexdigest(whole.encode())}"
    return LocalPlace(home / (name if node is None else f"{name}-node-{node}"), in_memory=True)
