"""Where checkpoints live: a tree of files that are written whole and durably, on disk, in memory or elsewhere."""

from __future__ import annotations

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

from moc.store.blobs import Blob, LocalBlob
from moc.store.claims import Claim
from moc.store.durable import sync_directory, temporary_of, write_parts_durably
from moc.store.fence import Fence


class Storage(ABC):
    """A tree of files, of which paths are relative and use slashes.  All methods may raise OSError."""

    name: str
    """What to call it in a message."""
    claim: Claim | None = None
    """In whose name files are written; None where nobody asks."""
    taken = False
    """It was locked for its claim."""

    @property
    def run(self) -> str:
        """Of its claim, which it must have."""
        assert self.claim is not None
        return self.claim.run

    @abstractmethod
    def write(self, path: str, parts: Iterable, final: bool = True) -> None:
        """Writes a file that holds some buffers one after the other; it is durable, and there, only at the end.

        Args:
            path: the file.
            parts: the buffers.
            final: without it, a crash of the machine may take the file away again until a final one is written beside
                it; that saves time.

        Raises:
            SupersededError: somebody else has the place by now.
        """

    @abstractmethod
    def create(self, path: str, parts: Iterable) -> bool:
        """The same, unless the file is there already; whether it was not."""

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
    def discard(self, directory: str, first: str, mark: str) -> None:
        """Removes a directory of files in a way in which somebody who was superseded does no harm.

        Args:
            directory: which; it need not exist.
            first: the file that goes before all others.
            mark: a file that is there before anything goes, and until all is gone.

        Raises:
            SupersededError: somebody else has the place by now; nothing is removed.
        """

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Room that is left; None where that is not known."""

    def path(self, path: str) -> str:
        """What to call a file in a message."""
        return f"{self.name}/{path}"

    @abstractmethod
    def lock(self) -> None:
        """Takes the place for its claim; without one, for this process, as long as it lives.

        An older term of the same launch loses it at once, whatever has become of it; another launch keeps it.

        Raises:
            TakenError: another launch has it, or a newer term.
        """

    @abstractmethod
    def check_owner(self) -> None:
        """Asks whether nobody else has taken the place, if it has a claim; before anything is made of it.

        Raises:
            SupersededError: another launch has, or a newer term of this one.
        """


class LocalPlace(Storage):
    """A directory of this machine.

    Args:
        root: the directory; made when something is written.
        patience: seconds to wait for a lock, since the job before may still be dying.
        in_memory: it is in a memory file system.
        claim: in whose name files are written there.
    """

    def __init__(self, root: str | Path, patience: float = 10.0, in_memory: bool = False, claim: Claim | None = None):
        self.root, self.name, self._in_memory = Path(root), str(root), in_memory
        self._patience, self.claim = patience, claim
        self._fence = claim and Fence(self.root, claim, patience)

    def write(self, path: str, parts: Iterable, final: bool = True) -> None:
        """See :class:`Storage`; who has the place is asked when all is written (:mod:`moc.store.fence`)."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with self._noticing_losses():
            write_parts_durably(target, parts, name_too=final, tag=self._tag, check=self.check_owner)
        if final and target.parent != self.root:
            sync_directory(self.root)  # of which the directory may be new

    def create(self, path: str, parts: Iterable) -> bool:
        """See :class:`Storage`."""
        target = self.root / path
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
        return (self.root / path).read_bytes()

    def blob(self, path: str) -> Blob:
        """See :class:`Storage`."""
        return LocalBlob(self.root / path, self._in_memory)

    def names(self, directory: str = "") -> list[str]:
        """See :class:`Storage`."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self.root / directory))
        return []

    def remove(self, path: str) -> None:
        """See :class:`Storage`; what begins it is durable."""
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

    def discard(self, directory: str, first: str, mark: str) -> None:
        """See :class:`Storage`.

        The mark gets its name as publications do.  All else is done to the directory that was open before that, so
        that it cannot concern another one that somebody has made of the same name since.
        """
        path = self.root / directory
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
        with contextlib.suppress(OSError):  # it is gone, or somebody writes into it
            path.rmdir()
        sync_directory(self.root)

    def free_bytes(self) -> int:
        """See :class:`Storage`."""
        existing = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free

    def lock(self) -> None:
        """See :class:`Storage`; that this process lives is not inherited by those that it forks."""
        self._fence = self._fence or Fence(self.root, Claim.of_process(), self._patience)
        self._fence.take()
        self.taken = True

    def check_owner(self) -> None:
        """See :class:`Storage`."""
        if self._fence is not None:
            self._fence.check()

    @property
    def _tag(self) -> str:
        return self.claim.tag if self.claim is not None else ""

    @contextlib.contextmanager
    def _noticing_losses(self):
        """Who was superseded may find that its temporary file is gone."""
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
            except (IsADirectoryError, PermissionError):  # systems differ in what they say
                _remove_directory(directory, name)


def _remove_directory(parent: int, name: str) -> None:
    descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        _unlink_all(descriptor, "", "")
    finally:
        os.close(descriptor)
    os.rmdir(name, dir_fd=parent)
