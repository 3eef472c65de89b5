"""Claims and fences: only the newest term of the launch that owns a directory may publish in it.

No step waits for a worker of the same launch, and safety does not depend on locks: a lock only shows another launch
that the owner is alive.  That no superseded worker publishes follows from the order of the steps, on any file system
with consistent reads:

    publishing      write a temporary file whose name has the term; read the fence; if it is not newer, rename
    beginning       write the fence, in the same way; then remove the temporary files of older terms; read it again

A publisher that reads the fence before the new one is written has already created its temporary file.  Either it
renames the file before the removal, and the new term finds the published file afterwards.  Or the file is gone, and the
rename fails.

The first byte of a launch's lock file is locked while the launch is alive, and the second while it owns the directory.
If the fence is damaged, these locks show the owner, so that no second owner is admitted.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO
from weakref import WeakValueDictionary

import xxhash

from moc.cli_output import print_once
from moc.files import decode
from moc.files.safe_directory import MAX_SMALL_FILE_BYTES, RefusedFileError, SafeDirectory, open_without_links
from moc.store.errors import OUT_OF_SPACE_ERRNOS, SupersededError, TakenError

_WORD = re.compile(r"[0-9A-Za-z]{1,40}")
_TAG = re.compile(r"\.([0-9A-Za-z]{1,40})-(\d+)-(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Claim:
    """The identity under which a worker publishes.

    Attributes:
        job: unique id of the launch.
        term: controller epoch and generation; it only grows within a launch, and is unique to a membership.
        run: the run that the checkpoints belong to, across launches; empty if not checked.
    """

    job: str
    term: tuple[int, int] = (0, 0)
    run: str = ""

    @classmethod
    def of_process(cls) -> Claim:
        """Returns a unique claim, for a program that is not a worker of a job."""
        return cls(secrets.token_hex(8))

    @property
    def tag(self) -> str:
        """Job and term as used in file names."""
        return f"{_tag_of_job(self.job)}-{self.term[0]}-{self.term[1]}"

    @property
    def generation(self) -> str:
        """The term as shown in messages."""
        return f"{self.term[0]}.{self.term[1]}"

    def supersedes(self, name: str) -> bool:
        """Returns whether a file name has the tag of an older term or of another launch; False without a tag."""
        tag = term_in(name)
        return tag is not None and (tag[0] != _tag_of_job(self.job) or tag[1] < self.term)

    def made(self, name: str) -> bool:
        """Returns whether a file name has the tag of any term of this launch."""
        tag = term_in(name)
        return tag is not None and tag[0] == _tag_of_job(self.job)


def term_in(name: str) -> tuple[str, tuple[int, int]] | None:
    """Returns the job and term of the tag in a file name; None without a tag."""
    match = _TAG.search(name)
    return match and (match[1], (int(match[2]), int(match[3])))


def _tag_of_job(job: str) -> str:
    return job if _WORD.fullmatch(job) else xxhash.xxh3_64_hexdigest(job.encode())


NAME = ".fence"
_LOCK = ".lock"
_HAS_FILES = re.compile(r"iter_\d{7,}")
_GIVEN_UP = ".given-up"
_UNFINISHED = (".tmp", ".incomplete", _GIVEN_UP)
_POLL_S = 0.05
_REMEMBERED = 200  # launches
_LIFE, _OWNERSHIP = 0, 1  # bytes of a lock file; earlier versions lock all of it
_FLOCK = "hhqqi4x"  # struct flock of Linux


class _Lock:
    """A lock file of this process; closing it releases the locks, and forked children do not inherit them."""

    def __init__(self, file: BinaryIO):
        self.file, self.owns = file, False


_open_locks: WeakValueDictionary[Path, _Lock] = WeakValueDictionary()
"""Lock files of this process by real path, held while a fence uses them."""

_newest: dict[Path, _Lock] = {}
"""Lock file of a job's newest term by directory: shows that the job is alive between generations too."""


@dataclass(frozen=True)
class Holder:
    """The owner of a directory, and the launches that owned it before and may not reclaim it."""

    claim: Claim
    host: str
    pid: int
    before: tuple[str, ...] = ()

    @classmethod
    def this(cls, claim: Claim, before: tuple[str, ...]) -> Holder:
        """Returns this process as the owner."""
        return cls(claim, socket.gethostname(), os.getpid(), before)

    def to_json(self) -> str:
        """Returns JSON text with its hash."""
        claim = self.claim
        return decode.encode_with_hash(
            asdict(_Stored(claim.job, claim.run, claim.term, self.host, self.pid, self.before))
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Holder:
        """Inverts :meth:`to_json`; raises ValueError on other text."""
        plain = decode.decode_verified(text, _Stored)
        return cls(Claim(plain.job, plain.term, plain.run), plain.host, plain.pid, plain.before)


@dataclass(frozen=True)
class _Stored:
    """The fields of a fence."""

    job: decode.Name
    run: decode.Name = ""
    term: tuple[decode.Count, decode.Count] = (0, 0)
    host: decode.Name = ""
    pid: decode.Count = 0
    before: tuple[decode.Name, ...] = ()


def refuse_superseded(claim: Claim, owner: Holder | None, name: str) -> None:
    """Raises if a newer claim than the caller's owns the location.

    Raises:
        SupersededError: a newer generation of the same launch, or another launch, owns the location.
    """
    if owner is None or (owner.claim.job == claim.job and owner.claim.term <= claim.term):
        return
    if owner.claim.job == claim.job:
        raise SupersededError(
            f"generation {owner.claim.generation} of this job, led by process {owner.pid} on {owner.host}, has {name}. "
            f"The job has replaced this worker of generation {claim.generation}, which publishes nothing. Fix: none is "
            "needed; if the job has ended, start it again"
        )
    raise SupersededError(
        f"another job, process {owner.pid} on {owner.host}, has taken {name}. Fix: stop one of the jobs, or give this "
        "one another directory (--ckpt-dir, --save)"
    )


def successors(claim: Claim, owner: Holder | None, name: str) -> tuple[str, ...]:
    """Returns the launches that a claim supersedes when it takes a location.

    Raises:
        SupersededError: the claim itself has been superseded.
    """
    if owner is None:
        return ()
    if owner.claim.job == claim.job or claim.job in owner.before:
        refuse_superseded(claim, owner, name)
        return owner.before
    return (*owner.before, owner.claim.job)[-_REMEMBERED:]


class _AliveError(Exception):
    """Another launch owns the directory and is alive; the argument describes its process."""


class Fence:
    """The fence of a directory, for one claim.

    Args:
        root: the directory.
        claim: claim under which this process publishes.
        patience: seconds to wait for another launch, which may still be exiting.
    """

    def __init__(self, root: Path, claim: Claim, patience: float = 10.0):
        self._root, self.claim, self._patience, self._tree = root, claim, patience, SafeDirectory(root)
        self._lock: _Lock | None = None
        self._other_owner, self._has_begun = "", False

    def take(self, make_room: Callable[[], None] = lambda: None) -> None:
        """Begins the term of the claim; from then on, older terms cannot publish.

        If the file system is too full for the fence, unfinished files of other terms are removed first.  If another
        launch begins at this moment, this may cost it a save.

        Args:
            make_room: removes other unpublished files then; called only if no other launch is alive.

        Raises:
            TakenError: another launch owns the directory and is alive.
            SupersededError: the claim has been superseded.
            OSError: the fence cannot be read or written.
        """
        with self._tree.directory(creates=True):
            pass
        if self._has_begun and (holder := self.read()) is not None and holder.claim == self.claim:
            self._lock_liveness()  # the file may have been removed
            self._lock_ownership(True)
            return  # each save takes the directory, and older terms have nothing left in its checkpoints
        try:
            self._take()
        except OSError as error:
            is_full = error.errno in OUT_OF_SPACE_ERRNOS
            owner = self.read() if is_full else None
            is_same_job = owner is not None and owner.claim.job == self.claim.job
            if not is_full or (owner is not None and not is_same_job and self._live_process(owner) is not None):
                raise
            self._sweep_unfinished()
            make_room()
            self._take()

    def _take(self) -> None:
        deadline = time.monotonic() + self._patience
        while not self._try_begin():
            if time.monotonic() > deadline:
                raise _taken_error(self._root, self._other_owner)
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raises if a newer claim has taken the directory.

        Raises:
            SupersededError: a newer generation or another launch has taken it.
        """
        refuse_superseded(self.claim, self.read(), str(self._root))

    def read(self) -> Holder | None:
        """Returns the directory's owner; None if it never had one.  If the fence is damaged, lock files name it."""
        try:
            return Holder.from_json(self._tree.read(NAME, MAX_SMALL_FILE_BYTES))
        except FileNotFoundError:
            return None
        except (RefusedFileError, ValueError) as error:
            print_once(f"{self._root / NAME} is damaged ({error}): the lock files there show who owns {self._root}")
            return self._owner_by_locks()

    def _owner_by_locks(self) -> Holder | None:
        """Returns the live launch that owns the directory; if there is none, the one with the newest lock file."""
        holders: list[tuple[bool, int, Holder]] = []
        for name in self._tree.list_names():
            tag = term_in(name)
            if tag is None or not name.startswith(f"{_LOCK}."):
                continue
            owner, job = self._locker(name, _OWNERSHIP), self.claim.job if self.claim.made(name) else tag[0]
            with contextlib.suppress(FileNotFoundError), self._tree.directory() as directory:
                made = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mtime_ns
                holder = Holder(Claim(job, tag[1]), socket.gethostname(), owner or 0)
                holders.append((owner is not None, made, holder))
        return max(holders, key=lambda entry: entry[:2])[2] if holders else None

    def _try_begin(self) -> bool:
        """Tries to begin the term; False if another launch is alive or was faster."""
        self._lock_liveness()
        self._has_begun = False
        try:
            if self._try_write():
                self._sweep()
                self._lock_liveness()  # the previous owner may have swept the lock away
                self._lock_ownership(True)
                owner = self.read()
                self._has_begun = owner is not None and owner.claim == self.claim
        finally:
            if not self._has_begun:
                self._lock_ownership(False)
        return self._has_begun

    def _try_write(self) -> bool:
        """Writes the fence, unless another launch is alive or faster."""
        try:
            self._tree.write(NAME, self._successor(), tag=self.claim.tag)
            return True
        except FileNotFoundError:  # another term has begun meanwhile
            pass
        except _AliveError as error:
            self._other_owner = f" ({error})"
        except IsADirectoryError:
            self._move_aside()
        return False

    def _successor(self) -> Iterator[bytes]:
        """Yields the claim's fence; reads the present one only after the temporary file exists (module docstring)."""
        owner = self.read()
        before = successors(self.claim, owner, str(self._root))
        if owner is not None and owner.claim.job != self.claim.job:
            process = self._live_process(owner)
            if process is not None:
                raise _AliveError(_describe_owner(owner, process))
        self._lock_ownership(True)
        yield Holder.this(self.claim, before).to_json().encode()

    def _move_aside(self) -> None:
        """Removes a directory that has the fence's name, but never a fence."""
        aside = f"{NAME}.{self.claim.tag}{_GIVEN_UP}"
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self._tree.directory() as directory:
            os.rename(
                f"{NAME}/", aside, src_dir_fd=directory, dst_dir_fd=directory
            )  # the slash admits only a directory
        self._tree.remove(aside)

    def _sweep(self) -> None:
        self._sweep_unfinished()
        for name in self._tree.list_names():
            if name.startswith(f"{_LOCK}.") and self.claim.supersedes(name):
                self._tree.remove(name)

    def _sweep_unfinished(self) -> None:
        for directory in ("", *filter(_HAS_FILES.fullmatch, self._tree.list_names())):
            for name in self._tree.list_names(directory):
                if name.endswith(_UNFINISHED) and name.startswith(".") and self.claim.supersedes(name):
                    self._give_up(directory, name)

    def _give_up(self, directory: str, name: str) -> None:
        """Removes an unfinished file or directory.

        A directory is renamed first, so that no part of it is published.
        """
        path = f"{directory}/{name}" if directory else name
        with contextlib.suppress(FileNotFoundError):  # it was published
            with self._tree.directory(directory) as parent:
                if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                    os.rename(name, name + _GIVEN_UP, src_dir_fd=parent, dst_dir_fd=parent)
                    path += _GIVEN_UP
            with contextlib.suppress(OSError):
                self._tree.remove(path)

    def _lock_liveness(self) -> None:
        """Locks the launch's file for the lifetime of this process."""
        path = self._root.resolve() / f"{_LOCK}.{self.claim.tag}"  # the name may be a link, which is not resolved
        if _is_current(path):
            self._lock = _open_locks[path]
            return
        lock = _Lock(open(open_without_links(path, os.O_RDWR | os.O_CREAT), "rb+", buffering=0))
        if _try_lock(lock.file, _LIFE):
            self._lock = _open_locks[path] = lock
            if self.claim.run:
                _newest[path.parent] = lock

    def _lock_ownership(self, owns: bool) -> None:
        if self._lock is None or self._lock.owns == owns:
            return
        if owns:
            self._lock.owns = _try_lock(self._lock.file, _OWNERSHIP)
        else:
            fcntl.lockf(self._lock.file, fcntl.LOCK_UN, 1, _OWNERSHIP)
            self._lock.owns = False

    def _live_process(self, holder: Holder) -> int | None:
        """Returns the process that holds an owner's lock, 0 if it is on another machine; None if no process does."""
        return self._locker(f"{_LOCK}.{holder.claim.tag}", _LIFE)

    def _locker(self, name: str, byte: int) -> int | None:
        """Returns the process that has write-locked a byte of a lock file, 0 if it is not visible; None without one.

        Read locks do not count, since every user with read access can take one.
        """
        path = self._root.resolve() / name
        if _is_current(path):  # opening and closing it would release the locks
            return os.getpid() if byte == _LIFE or _open_locks[path].owns else None
        try:
            descriptor = self._tree.open(name)
        except (FileNotFoundError, RefusedFileError):
            return None
        try:
            request = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, byte, 1, 0)
            kind, *_, process = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, request))
        finally:
            os.close(descriptor)
        return None if kind == fcntl.F_UNLCK else process


def release(job: str) -> None:
    """Releases the directories of a launch that has ended in this process, for its next one."""
    for path, lock in [*_open_locks.items()]:
        if Claim(job).made(path.name):
            lock.file.close()
            del _open_locks[path]
            if _newest.get(path.parent) is lock:
                del _newest[path.parent]


def lives(root: Path) -> Holder | None:
    """Returns the live owner of a directory, if there is one; does not contact it."""
    fence = Fence(root, Claim.of_process())
    owner = fence.read()
    return owner if owner is not None and fence._live_process(owner) is not None else None


def refuse_owned(root: Path, patience_s: float) -> None:
    """Checks whether another job could take a directory now; neither takes nor changes anything.

    Raises:
        TakenError: a live process still owns the directory after ``patience_s`` seconds.
        OSError: the fence cannot be read.
    """
    deadline, fence = time.monotonic() + patience_s, Fence(root, Claim.of_process())
    while (owner := fence.read()) is not None and (process := fence._live_process(owner)) is not None:
        if time.monotonic() > deadline:
            raise _taken_error(root, f" ({_describe_owner(owner, process)})")
        time.sleep(_POLL_S)


def _taken_error(root: Path, owner: str) -> TakenError:
    return TakenError(
        f"another job is using {root}{owner}. Fix: stop it, or give this job another directory (--ckpt-dir, --save)"
    )


def _describe_owner(holder: Holder, process: int) -> str:
    """Describes an owner, or the process of this machine that holds the lock in its stead."""
    if process in (0, holder.pid) or holder.host != socket.gethostname():
        return f"process {holder.pid} on {holder.host}"
    return f"process {process} of this machine, which holds its lock"


def _is_current(path: Path) -> bool:
    """Returns whether this process holds the existing lock file, rather than a removed one."""
    lock = _open_locks.get(path)
    with contextlib.suppress(FileNotFoundError):
        return lock is not None and os.path.samestat(os.fstat(lock.file.fileno()), path.lstat())
    return False


def _try_lock(lock_file: BinaryIO, byte: int) -> bool:
    try:
        fcntl.lockf(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):  # systems differ in the error
        return False
    return True
