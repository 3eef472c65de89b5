"""Storage of checkpoints: a tree of atomically and durably written files, on disk, in memory or elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from moc.store import valid
from moc.store.blobs import Blob, LocalBlob
from moc.store.claims import Claim
from moc.store.durable import sync_directory, temporary_of, write_parts_durably
from moc.store.fence import Fence


class Storage(ABC):
    """A tree of files; paths are relative and use slashes.  All methods may raise OSError."""

    name: str
    """Name in messages."""
    claim: Claim | None = None
    """Claim under which files are written; None if ownership is not checked."""
    taken = False
    """Whether the place was locked for its claim."""

    @property
    def run(self) -> str:
        """The run of the claim, which must be set."""
        assert self.claim is not None
        return self.claim.run

    @abstractmethod
    def write(self, path: str, parts: Iterable, final: bool = True) -> None:
        """Writes the concatenation of buffers as a file, atomically and durably.

        Without ``final``, a machine crash may lose it until a final one is written to the same directory; faster.

        Raises:
            SupersededError: another claim has taken the place.
        """

    @abstractmethod
    def create(self, path: str, parts: Iterable) -> bool:
        """Like :meth:`write`, unless the file exists; returns whether it was created."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The contents of a file; raises FileNotFoundError if it does not exist."""

    @abstractmethod
    def blob(self, path: str) -> Blob:
        """A file for range reads; raises FileNotFoundError if it does not exist."""

    @abstractmethod
    def names(self, directory: str = "") -> list[str]:
        """Names of the files and directories in a directory; empty if it does not exist."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Removes a file or a directory tree, if it exists."""

    @abstractmethod
    def discard(self, directory: str, first: str, mark: str) -> None:
        """Removes a directory of files safely even if the caller has been superseded.

        Args:
            directory: directory, which need not exist.
            first: file to remove before all others.
            mark: file that marks the removal from before the first deletion until the last.

        Raises:
            SupersededError: another claim has taken the place; nothing is removed.
        """

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Free space in bytes; None if unknown."""

    def path(self, path: str) -> str:
        """Name of a file in messages."""
        return f"{self.name}/{path}"

    @abstractmethod
    def lock(self) -> None:
        """Takes the place for its claim; without one, for the lifetime of this process.

        An older term of the same launch loses the place at once, in any state; another launch keeps it.

        Raises:
            TakenError: another launch, or a newer term, owns the place.
        """

    @abstractmethod
    def check_owner(self) -> None:
        """Checks that no other claim has taken the place, if it has one; called before changes.

        Raises:
            SupersededError: another launch, or a newer term of this one, has taken it.
        """


class LocalPlace(Storage):
    """A local directory.

    Args:
        root: the directory; created on the first write.
        patience: seconds to wait for a lock, since the previous job may still be exiting.
        in_memory: it is in a memory file system.
        claim: claim under which files are written.
    """

    def __init__(self, root: str | Path, patience: float = 10.0, in_memory: bool = False, claim: Claim | None = None):
        self.root, self.name, self._in_memory = Path(root), str(root), in_memory
        self._patience, self.claim = patience, claim
        self._fence = claim and Fence(self.root, claim, patience)

    def write(self, path: str, parts: Iterable, final: bool = True) -> None:
        """See :class:`Storage`; ownership is checked after the write (:mod:`moc.store.fence`)."""
        target = self._inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._noticing_losses():
            write_parts_durably(target, parts, name_too=final, tag=self._tag, check=self.check_owner)
        if final and target.parent != self.root:
            sync_directory(self.root)  # the directory may be new there

    def create(self, path: str, parts: Iterable) -> bool:
        """See :class:`Storage`."""
        target = self._inside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        whole = temporary_of(target, self._tag)
        try:
            write_parts_durably(whole, parts)
            os.link(whole, target)
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(OSError):
                whole.unlink(missing_ok=True)
        sync_directory(target.parent)
        return True

    def read(self, path: str) -> bytes:
        """See :class:`Storage`."""
        return self._inside(path).read_bytes()

    def blob(self, path: str) -> Blob:
        """See :class:`Storage`."""
        return LocalBlob(self._inside(path), self._in_memory)

    def names(self, directory: str = "") -> list[str]:
        """See :class:`Storage`."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self._inside(directory)))
        return []

    def remove(self, path: str) -> None:
        """See :class:`Storage`; the removal is durable."""
        target = self._inside(path)
        if target.is_dir():
            while target.exists():
                with contextlib.suppress(FileNotFoundError):  # another worker removes its own files there
                    shutil.rmtree(target)
        elif target.exists():
            target.unlink()
        else:
            return
        sync_directory(target.parent)

    def discard(self, directory: str, first: str, mark: str) -> None:
        """See :class:`Storage`.

        The mark is written like a publication.  Files are then removed through a descriptor opened before, so a
        directory recreated under the same name is not affected.
        """
        path = self._inside(directory)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            with contextlib.suppress(FileNotFoundError):  # another worker has removed it
                with self._noticing_losses():
                    write_parts_durably(path / mark, [], tag=self._tag, check=self.check_owner)
                _unlink_all(descriptor, first, mark)
        finally:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # it is gone, or another worker writes into it
            path.rmdir()
        sync_directory(self.root)

    def free_bytes(self) -> int:
        """See :class:`Storage`."""
        existing = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free

    def lock(self) -> None:
        """See :class:`Storage`; forked children do not inherit the lock."""
        self._fence = self._fence or Fence(self.root, Claim.of_process(), self._patience)
        self._fence.take()
        self.taken = True

    def check_owner(self) -> None:
        """See :class:`Storage`."""
        if self._fence is not None:
            self._fence.check()

    def _inside(self, path: str) -> Path:
        """A path of this place; raises ValueError for one that leads out of it."""
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{valid.shown(path)} is outside of {self.name}")
        return self.root / path

    @property
    def _tag(self) -> str:
        return self.claim.tag if self.claim is not None else ""

    @contextlib.contextmanager
    def _noticing_losses(self):
        """Checks ownership if a temporary file is gone, as it is for a superseded writer."""
        try:
            yield
        except FileNotFoundError:
            self.check_owner()
            raise


def _unlink_all(directory: int, first: str, last: str) -> None:
    names = [name for name in os.listdir(directory) if name not in (first, last)]
    for name in filter(None, (first, *names, last)):
        with contextlib.suppress(FileNotFoundError):
            try:
                os.unlink(name, dir_fd=directory)
            except (IsADirectoryError, PermissionError):  # systems differ in the error
                _remove_directory(directory, name)


def _remove_directory(parent: int, name: str) -> None:
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        _unlink_all(descriptor, "", "")
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=parent)
