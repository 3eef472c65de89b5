"""Storage of checkpoints: atomically and durably written files, read by byte ranges, and the lease of their job.

A lease is the time for which a job may still continue from its snapshots in memory.  A job records its lease when it
takes a directory, and renews it by the file's modification time.  While a lease lasts, no tool may remove the memory:
the job may be replacing its workers, and meanwhile no process uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moc.files import decode, safe_directory
from moc.files.safe_directory import (
    MAX_SMALL_FILE_BYTES,
    RefusedFileError,
    SafeDirectory,
    open_without_links,
    remove_owned,
)
from moc.store.errors import OUT_OF_SPACE_ERRNOS
from moc.store.ownership import Claim, Fence
from moc.store.reserved_memory import SLOTS_DIRECTORY, find_free_file

_READ_AHEAD_BYTES = 4 << 20  # bytes read ahead at once

_OWNERSHIP, _SPARE = 1 << 14, 1 << 15
"""Bytes for the ownership files, and of the reserve for them."""

LEASE_FILE = ".lease"

DEFAULT_LEASE_S = 30.0
"""Lease of memory that records none, in seconds: the default of ``mocrun --silence-timeout``."""


RESERVE_FILE = ".spare"
"""Name of the file in a directory of a node's memory."""

_PAGE = 4096


class SpaceReserve:
    """A file whose pages are released for small files when the file system is full; shared by a node's processes.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path):
        self._path = path

    def allocate(self, nbytes: int) -> None:
        """Extends the allocation to ``nbytes`` bytes.

        Any other entry with the file's name, such as a link, is replaced by a new file.

        Raises:
            OSError: the file system has too little room.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.close(open_without_links(self._path, os.O_RDWR))
        except FileNotFoundError:
            pass
        except RefusedFileError:
            remove_owned(self._path)
        with self._locked_file(os.O_CREAT) as file:
            if os.fstat(file).st_size < nbytes:
                os.posix_fallocate(file, 0, nbytes)

    def release(self, nbytes: int) -> bool:
        """Releases pages for a file of ``nbytes`` bytes; returns False, and releases nothing, if there are too few."""
        pages = (-(-nbytes // _PAGE) + 1) * _PAGE
        with contextlib.suppress(OSError), self._locked_file() as file:
            remaining = os.fstat(file).st_size - pages
            if remaining >= 0:
                os.ftruncate(file, remaining)
                return True
        return False

    @contextlib.contextmanager
    def _locked_file(self, flags: int = 0) -> Iterator[int]:
        file = open_without_links(self._path, os.O_RDWR | flags)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)


class Blob(Protocol):
    """A file that is immutable while it is read."""

    name: str
    """Name in messages."""
    size: int
    """Size in bytes."""

    def read(self, start: int, stop: int) -> memoryview:
        """Returns the bytes [start, stop); writing into them does not change the file."""
        ...

    def will_read(self, start: int, stop: int) -> None:
        """Hints that the bytes [start, stop) will be read soon."""


class LocalBlob:
    """A memory-mapped local file: ranges are read without a copy.

    Args:
        path: the file.
        in_memory: the file is in a memory file system, so reading ahead is skipped.
        descriptor: a descriptor of the file, which the blob takes over; by default the path is opened.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, in_memory: bool = False, descriptor: int | None = None):
        self.name, self._in_memory = str(path), in_memory
        descriptor = SafeDirectory(path.parent).open(path.name) if descriptor is None else descriptor
        self._file = open(descriptor, "rb", buffering=0)  # stays open for reading ahead
        self.size = os.fstat(self._file.fileno()).st_size
        self._bytes = memoryview(b"")
        if self.size:  # private and writable, as torch expects of tensors; pages are copied only on write
            mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
            mapped.madvise(mmap.MADV_SEQUENTIAL)
            self._bytes = memoryview(mapped)

    def read(self, start: int, stop: int) -> memoryview:
        return self._bytes[start:stop]

    def will_read(self, start: int, stop: int) -> None:
        """Reads the range into the page cache; blocks, but releases the GIL.

        ``madvise`` would be cheaper, but reads less far ahead than a disk needs.
        """
        if self._in_memory:
            return
        scratch = memoryview(bytearray(min(_READ_AHEAD_BYTES, stop - start)))
        for position in range(start, stop, _READ_AHEAD_BYTES):
            os.preadv(self._file.fileno(), [scratch[: stop - position]], position)


class Storage(ABC):
    """A tree of files; paths are relative and use slashes.  All methods may raise OSError."""

    name: str
    """Name in messages."""
    claim: Claim | None = None
    """Claim under which files are written; None if ownership is not checked."""
    is_locked = False
    """Whether the location was locked for its claim."""

    @property
    def run(self) -> str:
        """The run of the claim, which must be set."""
        assert self.claim is not None
        return self.claim.run

    @abstractmethod
    def write(self, path: str, parts: Iterable, is_durable: bool = True) -> None:
        """Writes the concatenation of buffers as a file, atomically and durably.

        Without ``is_durable``, a machine crash may lose it until a final one is written to the same directory; faster.

        Raises:
            SupersededError: another claim has taken the location.
        """

    @abstractmethod
    def create(self, path: str, parts: Iterable) -> bool:
        """Like :meth:`write`, unless the file exists; returns whether it was created."""

    @abstractmethod
    def read(self, path: str, max_bytes: int = safe_directory.MAX_MANIFEST_BYTES) -> bytes:
        """Returns the contents of a file.

        Raises:
            FileNotFoundError: the file does not exist.
            RefusedFileError: the file has more than ``max_bytes`` bytes, or is not a regular file.
        """

    @abstractmethod
    def open_blob(self, path: str) -> Blob:
        """Returns a file for range reads; raises FileNotFoundError if it does not exist."""

    @abstractmethod
    def list_names(self, directory: str = "") -> list[str]:
        """Returns the names of the files and directories in a directory; empty if it does not exist."""

    def list_refused(self) -> list[str]:
        """Returns the names of entries that are neither files nor directories, such as links: they are not read."""
        return []

    @abstractmethod
    def remove(self, path: str) -> None:
        """Removes a file or a directory tree, if it exists."""

    @abstractmethod
    def remove_files(self, directory: str, names: Iterable[str]) -> None:
        """Removes files of a directory, if they exist."""

    @abstractmethod
    def remove_directory(self, directory: str, first: str, mark: str) -> None:
        """Removes a directory of files safely even if the caller has been superseded.

        Args:
            directory: directory, which need not exist.
            first: file to remove before all others.
            mark: file that marks the removal from before the first deletion until the last.

        Raises:
            SupersededError: another claim has taken the location; nothing is removed.
        """

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Returns the free space in bytes; None if unknown."""

    def display_path(self, path: str) -> str:
        """Returns the name of a file in messages."""
        return f"{self.name}/{path}"

    @abstractmethod
    def lock(self, make_room: Callable[[], None] = lambda: None) -> None:
        """Takes the location for its claim; without one, for the lifetime of this process.

        An older term of the same launch loses the location immediately, in any state; another launch keeps it.
        ``make_room`` removes unpublished files, if the file system is too full to take it.

        Raises:
            TakenError: another launch, or a newer term, owns the location.
        """

    @abstractmethod
    def check_owner(self) -> None:
        """Checks that no other claim has taken the location, if it has one; called before changes.

        Raises:
            SupersededError: another launch, or a newer term of this one, has taken it.
        """


class LocalStorage(Storage):
    """A local directory.

    Args:
        root: the directory; created on the first write.
        lock_timeout_s: seconds to wait for a lock, since the previous job may still be exiting.
        in_memory: whether the directory is in a memory file system.
        claim: claim under which files are written.
    """

    def __init__(
        self, root: str | Path, lock_timeout_s: float = 10.0, in_memory: bool = False, claim: Claim | None = None
    ):
        self.root, self.name, self._in_memory = Path(root), str(root), in_memory
        self._directory = SafeDirectory(root, is_owned=in_memory)
        self._lock_timeout_s, self.claim = lock_timeout_s, claim
        self._fence = claim and Fence(self.root, claim, lock_timeout_s)

    def write(self, path: str, parts: Iterable, is_durable: bool = True) -> None:
        """See :class:`Storage`; ownership is checked after the write (:mod:`moc.store.ownership`)."""
        with self._checking_owner_on_loss():
            if self._in_memory:
                self._write_in_memory(path, list(parts), is_durable)
            else:
                self._directory.write(path, parts, syncs_name=is_durable, tag=self._tag, check=self.check_owner)
        if is_durable and "/" in path:
            self._directory.sync()  # the directory may be new there

    def write_into_reserved_file(self, path: str, parts: Iterable, reserved_name: str) -> None:
        """Like :meth:`write`, not ``final``, into a slot of a name: memory that is already allocated, if one is free.

        The location must be in memory.
        """
        data = [memoryview(part) for part in parts]
        file = find_free_file(self.root / SLOTS_DIRECTORY, reserved_name, sum(buffer.nbytes for buffer in data))
        with open(open_without_links(file, os.O_RDWR), "wb", buffering=0) as written:
            for unwritten in data:
                while unwritten:
                    unwritten = unwritten[written.write(unwritten) :]
        self.check_owner()
        self._directory.link(file.relative_to(self.root).as_posix(), path)

    def create(self, path: str, parts: Iterable) -> bool:
        try:
            self._directory.write(path, parts, tag=self._tag, replaces=False)
        except FileExistsError:
            return False
        return True

    def read(self, path: str, max_bytes: int = safe_directory.MAX_MANIFEST_BYTES) -> bytes:
        return self._directory.read(path, max_bytes)

    def open_blob(self, path: str) -> Blob:
        return LocalBlob(self.root / path, self._in_memory, self._directory.open(path))

    def list_names(self, directory: str = "") -> list[str]:
        return self._directory.list_names(directory)

    def list_refused(self) -> list[str]:
        return self._directory.list_refused()

    def remove(self, path: str) -> None:
        """See :class:`Storage`; the removal is durable."""
        if path:
            self._directory.remove(path)
        elif self._in_memory:
            SafeDirectory(self.root.parent, is_owned=True).remove(self.root.name)
        else:
            raise ValueError(f"{self.name} is the directory of the checkpoints, which is never removed")

    def remove_files(self, directory: str, names: Iterable[str]) -> None:
        """See :class:`Storage`; the removal is durable."""
        self._directory.remove_entries(directory, names)

    def remove_directory(self, directory: str, first: str, mark: str) -> None:
        """See :class:`Storage`.

        The mark is written like a publication.  Mark and removal go through one descriptor, so a
        directory recreated under the same name is not affected.
        """
        try:
            with self._directory.directory(directory) as descriptor:
                with contextlib.suppress(FileNotFoundError):  # another worker has removed it
                    with self._checking_owner_on_loss():
                        safe_directory.write_in(descriptor, mark, [], tag=self._tag, check=self.check_owner)
                    safe_directory.delete_contents(descriptor, first, mark)
        except (FileNotFoundError, NotADirectoryError):
            return
        self._directory.remove_if_empty(directory)

    def free_bytes(self) -> int:
        existing = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free

    def lock(self, make_room: Callable[[], None] = lambda: None) -> None:
        """See :class:`Storage`; forked children do not inherit the lock.

        A job keeps room for the files of its next generation or launch, since the file system may be full then.
        """

        def make_all_room() -> None:
            self.reserve.release(_OWNERSHIP)
            if not self._in_memory:  # there, a recovery may need parts that nothing has published
                make_room()

        self._fence = self._fence or Fence(self.root, Claim.of_process(), self._lock_timeout_s)
        self._fence.take(make_all_room)
        self.is_locked = True
        if self.claim is not None and self.claim.run and not self._in_memory:
            with contextlib.suppress(OSError):
                self.reserve.allocate(_SPARE)

    def check_owner(self) -> None:
        if self._fence is not None:
            self._fence.check()

    @property
    def reserve(self) -> SpaceReserve:
        """Reserve for small files when the file system is full."""
        return SpaceReserve(self.root / RESERVE_FILE)

    def _write_in_memory(self, path: str, parts: list, is_durable: bool) -> None:
        while True:
            try:
                return self._directory.write(path, parts, syncs_name=is_durable, tag=self._tag, check=self.check_owner)
            except OSError as error:  # another process may take the released pages; then the next try releases more
                if error.errno not in OUT_OF_SPACE_ERRNOS or not self.reserve.release(
                    sum(memoryview(part).nbytes for part in parts)
                ):
                    raise

    @property
    def _tag(self) -> str:
        return self.claim.tag if self.claim is not None else ""

    @contextlib.contextmanager
    def _checking_owner_on_loss(self):
        """Checks ownership if a temporary file is gone: a new owner removes those of superseded writers."""
        try:
            yield
        except FileNotFoundError:
            self.check_owner()
            raise


@dataclass(frozen=True)
class _Lease:
    """The field of a lease: its length in seconds."""

    seconds: decode.Seconds


def record_lease(storage: Storage, seconds: float) -> None:
    """Records the lease of the job that has taken a directory, from now on.

    Raises:
        SupersededError: another claim has taken the location.
        OSError: the lease cannot be written.
    """
    storage.write(LEASE_FILE, [decode.encode_with_hash({"seconds": seconds}).encode()])


def renew_lease(root: Path) -> None:
    """Renews the lease; does nothing if the directory is gone, or the file is another job's."""
    with contextlib.suppress(FileNotFoundError, RefusedFileError):
        descriptor = open_without_links(root / LEASE_FILE, os.O_RDONLY)
        try:
            os.utime(descriptor)
        finally:
            os.close(descriptor)


def lease_remaining_s(root: Path) -> float:
    """Returns the seconds until the lease of the job in a directory expires; not positive afterwards.

    Raises:
        OSError: the directory cannot be read.
    """
    paths = [root, *root.iterdir()]
    newest = max(path.lstat().st_mtime for path in paths)
    return newest + _lease_length_s(root) - time.time()


def _lease_length_s(root: Path) -> float:
    try:
        return decode.decode_verified(SafeDirectory(root).read(LEASE_FILE, MAX_SMALL_FILE_BYTES), _Lease).seconds
    except (FileNotFoundError, RefusedFileError, ValueError):
        return DEFAULT_LEASE_S
