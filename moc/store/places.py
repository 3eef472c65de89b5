"""Where checkpoints live: a tree of files that are written whole and durably, on disk, in memory or elsewhere."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO
from weakref import WeakValueDictionary

from moc.store.blobs import Blob, LocalBlob
from moc.store.durable import sync_directory, write_parts_durably
from moc.store.errors import CheckpointError

_LOCK = ".lock"
_held: WeakValueDictionary[Path, TextIO] = WeakValueDictionary()
"""Lock files of this process, by their real paths, as long as a place has them; closing one gives the lock up."""


class Place(ABC):
    """A tree of files, of which paths are relative and use slashes.  All methods may raise OSError."""

    name: str
    """What to call it in a message."""

    @abstractmethod
    def write(self, path: str, parts: Iterable, final: bool = True) -> None:
        """Writes a file that holds some buffers one after the other; it is durable, and there, only at the end.

        Args:
            path: the file.
            parts: the buffers.
            final: without it, a crash of the machine may take the file away again until a final one is written beside
                it; that saves time.
        """

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The content of a file; FileNotFoundError where there is none."""

    @abstractmethod
    def blob(self, path: str) -> Blob:
        """A file to be read by ranges; FileNotFoundError where there is none."""

    @abstractmethod
    def names(self, directory: str = "") -> list[str]:
        """Names of files and directories in a directory; none if it does not exist."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Removes a file, or a directory and all that it holds; it need not exist."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Room that is left; None where that is not known."""

    def path(self, path: str) -> str:
        """What to call a file in a message."""
        return f"{self.name}/{path}"

    @abstractmethod
    def lock(self) -> None:
        """Takes the place for this process, as long as it lives.

        Raises:
            CheckpointError: another process has it.
        """

    def check_owner(self) -> None:  # noqa: B027 - where a lock lasts as long as its process, there is nothing to ask
        """Asks whether the place still is this process's, if it was ever locked; before anything is made of it.

        Raises:
            CheckpointError: another process has taken it since.
        """


class LocalPlace(Place):
    """A directory of this machine.

    Args:
        root: the directory; made when something is written.
        patience: seconds to wait for a lock, since the job before may still be dying.
        in_memory: it is in a memory file system.
    """

    def __init__(self, root: str | Path, patience: float = 10.0, in_memory: bool = False):
        self.root, self.name, self._in_memory = Path(root), str(root), in_memory
        self._patience, self._lock_file = patience, None

    def write(self, path: str, parts: Iterable, final: bool = True) -> None:
        """See :class:`Place`."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        write_parts_durably(target, parts, name_too=final)
        if final and target.parent != self.root:
            sync_directory(self.root)  # of which the directory may be new

    def read(self, path: str) -> bytes:
        """See :class:`Place`."""
        return (self.root / path).read_bytes()

    def blob(self, path: str) -> Blob:
        """See :class:`Place`."""
        return LocalBlob(self.root / path, self._in_memory)

    def names(self, directory: str = "") -> list[str]:
        """See :class:`Place`."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.root / directory))
        return []

    def remove(self, path: str) -> None:
        """See :class:`Place`; what begins it is durable."""
        target = self.root / path
        if target.is_dir():
            while target.exists():
                with contextlib.suppress(FileNotFoundError):  # another worker removes what is its own there
                    shutil.rmtree(target)
        elif target.exists():
            target.unlink()
        else:
            return
        sync_directory(target.parent)

    def free_bytes(self) -> int:
        """See :class:`Place`."""
        existing = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free

    def lock(self) -> None:
        """See :class:`Place`; the lock goes with the process, and is not inherited by those that it forks."""
        self.root.mkdir(parents=True, exist_ok=True)
        path = (self.root / _LOCK).resolve()
        if _is_current(path):
            self._lock_file = _held[path]
            return
        lock_file = open(path, "a+")
        deadline = time.monotonic() + self._patience
        while not _try_lock(lock_file):
            if time.monotonic() > deadline:
                raise CheckpointError(f"another job is using {self.name}: stop it, or give this one another --ckpt-dir")
            time.sleep(0.05)
        self._lock_file = _held[path] = lock_file


def _is_current(path: Path) -> bool:
    """Whether this process holds the lock file that is there now, and not one that was removed."""
    held = _held.get(path)
    with contextlib.suppress(FileNotFoundError):
        return held is not None and os.path.samestat(os.fstat(held.fileno()), path.stat())
    return False


def _try_lock(lock_file) -> bool:
    try:
        fcntl.lockf(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # systems differ in what they say
        return False
    return True
