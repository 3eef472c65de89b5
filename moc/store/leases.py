"""Leases of memory: how long a job may still continue from its snapshots there after its last renewal.

A job records its lease when it takes a directory, and renews it by the file's modification time.  While a lease lasts,
no tool may remove the memory: the job may be replacing its workers, and meanwhile no process uses it.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from moc.files import decode
from moc.files.tree import SMALL, RefusedFileError, Tree, open_single
from moc.store.storage import Storage

NAME = ".lease"

DEFAULT_S = 30.0
"""Lease of memory that records none, in seconds: the default of ``mocrun --silence-timeout``."""


@dataclass(frozen=True)
class _Stored:
    """The field of a lease: its length in seconds."""

    seconds: decode.Seconds


def record_lease(place: Storage, seconds: float) -> None:
    """Records the lease of the job that has taken a directory, from now on.

    Raises:
        SupersededError: another claim has taken the location.
        OSError: the lease cannot be written.
    """
    place.write(NAME, [decode.sealed({"seconds": seconds}).encode()])


def renew_lease(root: Path) -> None:
    """Renews the lease; does nothing if the directory is gone, or the file is another job's."""
    with contextlib.suppress(FileNotFoundError, RefusedFileError):
        descriptor = open_single(root / NAME, os.O_RDONLY)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)


def lease_left_s(root: Path) -> float:
    """Returns the seconds until the lease of the job in a directory expires; not positive afterwards.

    Raises:
        OSError: the directory cannot be read.
    """
    there = [root, *root.iterdir()]
    newest = max(path.lstat().st_mtime for path in there)
    return newest + _length_s(root) - time.time()


def _length_s(root: Path) -> float:
    try:
        return decode.unsealed(Tree(root).read(NAME, SMALL), _Stored).seconds
    except (FileNotFoundError, RefusedFileError, ValueError):
        return DEFAULT_S
