"""Fences: only the newest term of the launch that owns a directory may publish in it.

No step waits for a worker of the same launch, and safety does not depend on locks: a lock only shows another launch
that the owner is alive.  That no superseded worker publishes follows from the order of the steps, on any file system
with a consistent view:

    publishing      write a temporary file whose name has the term; read the fence; if it is not newer, rename
    beginning       write the fence, in the same way; then remove the temporary files of older terms; read it again

A publisher that reads the fence before the new one is written has already created its temporary file.  So either it
renames the file before its removal, and the new term sees what was published when it looks afterwards, or the file is
gone and the rename fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO
from weakref import WeakValueDictionary

from moc.files import decode
from moc.files.tree import SMALL, RefusedFileError, Tree
from moc.store.claims import Claim
from moc.store.errors import CheckpointError, SupersededError, TakenError

NAME = ".fence"
_LOCK = ".lock"
_HAS_FILES = re.compile(r"iter_\d{7,}")
_GIVEN_UP = ".given-up"
_UNFINISHED = (".tmp", ".incomplete", _GIVEN_UP)
_POLL_S = 0.05
_REMEMBERED = 200  # launches

_held: WeakValueDictionary[Path, TextIO] = WeakValueDictionary()
"""Lock files of this process by real path, held as long as a fence uses them; closing one releases the lock."""

_newest: dict[Path, TextIO] = {}
"""Lock file of a job's newest term by directory: shows that the job is alive between generations too."""


@dataclass(frozen=True)
class Holder:
    """The owner of a place, and the launches that owned it before and may not reclaim it."""

    claim: Claim
    host: str
    pid: int
    before: tuple[str, ...] = ()

    @classmethod
    def this(cls, claim: Claim, before: tuple[str, ...]) -> Holder:
        """This process as the owner."""
        return cls(claim, socket.gethostname(), os.getpid(), before)

    def to_json(self) -> str:
        """JSON text with its hash."""
        claim = self.claim
        return decode.sealed(asdict(_Stored(claim.job, claim.run, claim.term, self.host, self.pid, self.before)))

    @classmethod
    def from_json(cls, text: str | bytes) -> Holder:
        """The inverse of :meth:`to_json`; raises ValueError on other text."""
        plain = decode.unsealed(text, _Stored)
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


def refuse_superseded(claim: Claim, now: Holder | None, name: str) -> None:
    """Raises if a place is owned by a newer claim than the caller's.

    Raises:
        SupersededError: a newer generation of the same launch, or another launch, owns the place.
    """
    if now is None or (now.claim.job == claim.job and now.claim.term <= claim.term):
        return
    if now.claim.job == claim.job:
        raise SupersededError(
            f"generation {now.claim.generation} of this job, led by process {now.pid} on {now.host}, has {name}: this "
            f"worker of generation {claim.generation} was given up for lost, and publishes nothing"
        )
    raise SupersededError(
        f"another job, process {now.pid} on {now.host}, has taken {name}: stop one of them, or give this one another "
        "directory (--ckpt-dir, --save)"
    )


def successors(claim: Claim, now: Holder | None, name: str) -> tuple[str, ...]:
    """The launches that a claim supersedes when it takes a place.

    Raises:
        SupersededError: the claim itself has been superseded.
    """
    if now is None:
        return ()
    if now.claim.job == claim.job or claim.job in now.before:
        refuse_superseded(claim, now, name)
        return now.before
    return (*now.before, now.claim.job)[-_REMEMBERED:]


class _AliveError(Exception):
    """Another launch owns the directory and is alive."""


class Fence:
    """The fence of a directory, for one claim.

    Args:
        root: the directory.
        claim: claim under which this process publishes.
        patience: seconds to wait for another launch, which may still be exiting.
    """

    def __init__(self, root: Path, claim: Claim, patience: float = 10.0):
        self._root, self.claim, self._patience, self._tree = root, claim, patience, Tree(root)
        self._lock_file: TextIO | None = None

    def take(self) -> None:
        """Begins the term of the claim; from then on, older terms cannot publish.

        Raises:
            TakenError: another launch owns the directory and is alive.
            CheckpointError: the fence cannot be read.
            SupersededError: the claim has been superseded.
            OSError: the fence cannot be written.
        """
        with self._tree.directory(make=True):
            pass
        deadline = time.monotonic() + self._patience
        while not self._begins():
            if time.monotonic() > deadline:
                raise TakenError(
                    f"another job is using {self._root}: stop it, or give this one another directory (--ckpt-dir, "
                    "--save)"
                )
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raises if a newer claim has taken the directory.

        Raises:
            SupersededError: a newer generation or another launch has taken it.
        """
        refuse_superseded(self.claim, self.read(), str(self._root))

    def read(self) -> Holder | None:
        """The owner of the directory; None if it never had one.

        Raises:
            CheckpointError: the fence is unreadable.
        """
        try:
            return Holder.from_json(self._tree.read(NAME, SMALL))
        except FileNotFoundError:
            return None
        except (RefusedFileError, ValueError) as error:
            raise CheckpointError(
                f"{self._root / NAME} does not say whose {self._root} is ({error}): remove it, and start this job again"
            ) from None

    def _begins(self) -> bool:
        """Tries to begin the term; False if another launch is alive or was faster."""
        self._show_life()
        try:
            self._tree.write(NAME, self._successor(), tag=self.claim.tag)
        except FileNotFoundError:  # another term has begun meanwhile
            return False
        except _AliveError:
            return False
        self._sweep()
        self._show_life()  # the previous owner may have swept the lock away
        now = self.read()
        return now is not None and now.claim == self.claim

    def _successor(self) -> Iterator[bytes]:
        """The fence of the claim; reads the present one only after the temporary file is there: see above."""
        now = self.read()
        before = successors(self.claim, now, str(self._root))
        if now is not None and now.claim.job != self.claim.job and self._lives(now):
            raise _AliveError
        yield Holder.this(self.claim, before).to_json().encode()

    def _sweep(self) -> None:
        for directory in ("", *filter(_HAS_FILES.fullmatch, self._tree.names())):
            for name in self._tree.names(directory):
                if name.endswith(_UNFINISHED) and name.startswith(".") and self.claim.supersedes(name):
                    self._give_up(directory, name)
        for name in self._tree.names():
            if name.startswith(f"{_LOCK}.") and self.claim.supersedes(name):
                self._tree.remove(name)

    def _give_up(self, directory: str, name: str) -> None:
        """Removes an unfinished file or directory.

        A directory is renamed first, so that no part of it is published.
        """
        path = f"{directory}/{name}" if directory else name
        with contextlib.suppress(FileNotFoundError):  # it was published
            with self._tree.directory(directory) as there:
                if stat.S_ISDIR(os.stat(name, dir_fd=there, follow_symlinks=False).st_mode):
                    os.rename(name, name + _GIVEN_UP, src_dir_fd=there, dst_dir_fd=there)
                    path += _GIVEN_UP
            with contextlib.suppress(OSError):
                self._tree.remove(path)

    def _show_life(self) -> None:
        """Holds a lock for the lifetime of this process; forked children do not inherit it."""
        path = self._lock_path(self.claim)
        if _is_current(path):
            self._lock_file = _held[path]
            return
        lock_file = open(path, "a+", opener=_without_links)
        if _try_lock(lock_file):
            self._lock_file = _held[path] = lock_file
            if self.claim.run:
                _newest[path.parent] = lock_file

    def _lives(self, holder: Holder) -> bool:
        path = self._lock_path(holder.claim)
        if _is_current(path):
            return True
        try:
            with open(path, "r+", opener=_without_links) as lock_file:
                return not _try_lock(lock_file)
        except FileNotFoundError:
            return False

    def _lock_path(self, claim: Claim) -> Path:
        return self._root.resolve() / f"{_LOCK}.{claim.tag}"  # never what a link there leads to


def lives(root: Path) -> Holder | None:
    """The live owner of a directory, if there is one; does not contact it."""
    fence = Fence(root, Claim.of_process())
    now = fence.read()
    return now if now is not None and fence._lives(now) else None


def _is_current(path: Path) -> bool:
    """Whether this process holds the existing lock file, rather than a removed one."""
    held = _held.get(path)
    with contextlib.suppress(FileNotFoundError):
        return held is not None and os.path.samestat(os.fstat(held.fileno()), path.stat())
    return False


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _try_lock(lock_file: TextIO) -> bool:
    try:
        fcntl.lockf(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # systems differ in the error
        return False
    return True
