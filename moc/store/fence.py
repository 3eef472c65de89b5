"""Who may publish in a directory: the newest term of the launch that has it.

No step waits for anybody of the same launch, and no lock has to be safe: a lock only tells another launch that the
owner lives.  That nobody publishes who has been superseded follows from the order of the steps, on any file system
of which all see the same:

    publishing      write a temporary file whose name has the term; read the fence; if it is not newer, rename
    beginning       write the fence, in the same way; then remove the temporary files of older terms; read it again

A publisher that reads the fence before it is written has its temporary file there before that.  So either it renames
before the file is removed, and whoever begins sees what it has published when it looks afterwards, or it finds the
file gone, and its rename fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO
from weakref import WeakValueDictionary

from moc.store.claims import Claim
from moc.store.durable import sync_directory, temporary_of
from moc.store.errors import CheckpointError, SupersededError, TakenError

NAME = ".fence"
_LOCK = ".lock"
_HAS_FILES = re.compile(r"iter_\d{7,}")
_UNFINISHED = (".tmp", ".incomplete")
_POLL_S = 0.05
_REMEMBERED = 200  # launches

_held: WeakValueDictionary[Path, TextIO] = WeakValueDictionary()
"""Lock files of this process, by their real paths, as long as a fence has them; closing one gives the lock up."""

_newest: dict[Path, TextIO] = {}
"""By directory the lock file of a job's newest term: between two generations, too, it shows that the job lives."""


@dataclass(frozen=True)
class Holder:
    """Whose a place is.

    Attributes:
        claim: in whose name.
        host: where.
        pid: which process.
        before: launches that had the place before, and do not get it back.
    """

    claim: Claim
    host: str
    pid: int
    before: tuple[str, ...] = ()

    @classmethod
    def this(cls, claim: Claim, before: tuple[str, ...]) -> Holder:
        """This process."""
        return cls(claim, socket.gethostname(), os.getpid(), before)

    def to_json(self) -> str:
        """JSON text."""
        mine = {"run": self.claim.run, "job": self.claim.job, "term": self.claim.term}
        return json.dumps({**mine, "host": self.host, "pid": self.pid, "before": self.before})

    @classmethod
    def from_json(cls, text: str) -> Holder:
        """The inverse of :meth:`to_json`; KeyError, TypeError or ValueError if it is none."""
        plain = json.loads(text)
        job = str(plain["job"])
        epoch, generation = plain.get("term", (0, 0))
        claim = Claim(job, (int(epoch), int(generation)), str(plain.get("run", "")))
        return cls(claim, str(plain.get("host")), int(plain.get("pid", 0)), tuple(plain.get("before", ())))


def refuse_superseded(claim: Claim, now: Holder | None, name: str) -> None:
    """Returns if nothing newer than a claim has a place.

    Args:
        claim: who asks.
        now: who has it; None for nobody.
        name: of the place.

    Raises:
        SupersededError: a newer generation of the same launch has it, or another launch.
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
    """The launches that a claim comes after, if it may begin where somebody else was.

    Raises:
        SupersededError: it may not, since it was superseded already.
    """
    if now is None:
        return ()
    if now.claim.job == claim.job or claim.job in now.before:
        refuse_superseded(claim, now, name)
        return now.before
    return (*now.before, now.claim.job)[-_REMEMBERED:]


class Fence:
    """The fence of a directory, for one claim.

    Args:
        root: the directory.
        claim: in whose name this process publishes there.
        patience: seconds to wait for another launch, since it may still be dying.
    """

    def __init__(self, root: Path, claim: Claim, patience: float = 10.0):
        self._root, self.claim, self._patience = root, claim, patience
        self._lock_file: TextIO | None = None

    def take(self) -> None:
        """Begins the term of the claim; what older ones have not published by now, they never will.

        Raises:
            TakenError: another launch has the directory, and lives.
            CheckpointError: the fence cannot be read.
            SupersededError: the claim was superseded already.
            OSError: it cannot be written.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + self._patience
        while not self._begins():
            if time.monotonic() > deadline:
                raise TakenError(
                    f"another job is using {self._root}: stop it, or give this one another directory (--ckpt-dir, "
                    "--save)"
                )
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Returns if nothing newer has begun.

        Raises:
            SupersededError: something has.
        """
        refuse_superseded(self.claim, self.read(), str(self._root))

    def read(self) -> Holder | None:
        """Who has the directory; None if nobody ever had.

        Raises:
            CheckpointError: it does not say.
        """
        try:
            return Holder.from_json((self._root / NAME).read_text())
        except FileNotFoundError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._root / NAME} does not say whose {self._root} is ({error}): remove it, and start this job again"
            ) from None

    def _begins(self) -> bool:
        """Whether the term has begun; not so if another launch lives, or was quicker."""
        self._show_life()
        temporary = temporary_of(self._root / NAME, self.claim.tag)
        try:
            with open(temporary, "w", encoding="utf-8") as file:  # before the fence is read: see above
                now = self.read()
                before = successors(self.claim, now, str(self._root))
                if now is not None and now.claim.job != self.claim.job and self._lives(now):
                    return False
                file.write(Holder.this(self.claim, before).to_json())
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, self._root / NAME)
            sync_directory(self._root)
        except FileNotFoundError:  # somebody else has begun meanwhile
            return False
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        self._sweep()
        self._show_life()  # a launch that had the directory may have swept that away
        now = self.read()
        return now is not None and now.claim == self.claim

    def _sweep(self) -> None:
        for directory in self._directories():
            for name in _names(directory):
                if name.endswith(_UNFINISHED) and name.startswith(".") and self.claim.supersedes(name):
                    _give_up(directory / name)
        for name in _names(self._root):
            if name.startswith(f"{_LOCK}.") and self.claim.supersedes(name):
                (self._root / name).unlink(missing_ok=True)

    def _directories(self) -> Iterator[Path]:
        yield self._root
        for name in _names(self._root):
            if _HAS_FILES.fullmatch(name):
                yield self._root / name

    def _show_life(self) -> None:
        """Holds a lock as long as this process lives; those that it forks do not inherit it."""
        path = self._lock_path(self.claim)
        if _is_current(path):
            self._lock_file = _held[path]
            return
        lock_file = open(path, "a+")
        if _try_lock(lock_file):
            self._lock_file = _held[path] = lock_file
            if self.claim.run:
                _newest[path.parent] = lock_file

    def _lives(self, holder: Holder) -> bool:
        path = self._lock_path(holder.claim)
        if _is_current(path):
            return True
        try:
            with open(path, "r+") as lock_file:
                return not _try_lock(lock_file)
        except FileNotFoundError:
            return False

    def _lock_path(self, claim: Claim) -> Path:
        return (self._root / f"{_LOCK}.{claim.tag}").resolve()


def lives(root: Path) -> Holder | None:
    """The process that has a directory, if there is one; asks nothing of it."""
    fence = Fence(root, Claim.of_process())
    now = fence.read()
    return now if now is not None and fence._lives(now) else None


def _give_up(path: Path) -> None:
    """Removes what is unfinished; a directory goes as a whole, so that nobody gives a part of it a name."""
    try:
        if not path.is_dir():
            path.unlink()
            return
        doomed = path.with_name(f"{path.name}.given-up")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    except FileNotFoundError:  # it has got its name
        pass


def _names(directory: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.listdir(directory))
    return []


def _is_current(path: Path) -> bool:
    """Whether this process holds the lock file that is there now, and not one that was removed."""
    held = _held.get(path)
    with contextlib.suppress(FileNotFoundError):
        return held is not None and os.path.samestat(os.fstat(held.fileno()), path.stat())
    return False


def _try_lock(lock_file: TextIO) -> bool:
    try:
        fcntl.lockf(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # systems differ in what they say
        return False
    return True
