"""The directory of a node's Unix sockets, which other users cannot enter.

It has mode 0700 and lies in the directory that this user's jobs have in a memory file system
(:func:`moc.store.tiers.memory_home`), as ``/dev/shm/moc-UID/.sockets/NAME``.  Where that cannot be used, it is a
temporary directory.  The process that makes it holds a lock on it, which the kernel releases when the process dies.  A
directory without a lock is a leftover of a killed job, and the next job of the user removes it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moc.errors import UserError
from moc.files.tree import Tree, remove_own
from moc.store.errors import CheckpointError
from moc.store.tiers import SOCKETS, memory_home

_MEMORY = "/dev/shm"
_ATTEMPTS = 100  # another job may remove a new directory before it is locked


def memory_of_program(command: list[str]) -> str:
    """The memory file system that the command line of a program names by ``--ckpt-memory-dir``, or ``/dev/shm``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ckpt-memory-dir", nargs="?")
    return parser.parse_known_args(command[1:])[0].ckpt_memory_dir or _MEMORY


class SocketDirectoryError(UserError, OSError):
    """No directory can be made for the sockets of this node."""


@contextlib.contextmanager
def socket_directory(memory_dir: str = _MEMORY) -> Iterator[Path]:
    """Makes a directory for sockets, and removes it with its content in the end; also removes leftovers of killed jobs.

    Args:
        memory_dir: the memory file system to use, if that is possible.

    Raises:
        OSError: no directory can be made, not even a temporary one.
    """
    path, lock = _make(memory_dir)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            remove_own(path)
        os.close(lock)
        if path.parent.name == SOCKETS:  # other jobs may have directories there
            with contextlib.suppress(OSError):
                Tree(path.parent.parent).remove_if_empty(SOCKETS)


def _make(memory_dir: str) -> tuple[Path, int]:
    """Makes a directory in the first place where that is possible; returns it and the descriptor of its lock."""
    for memory in dict.fromkeys((memory_dir, _MEMORY)):
        with contextlib.suppress(CheckpointError, OSError):
            return _make_in(memory_home(memory).absolute() / SOCKETS, "")
    prefix = f"moc-sockets-{os.geteuid()}-"
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        with contextlib.suppress(OSError):
            return _make_in(Path(runtime), prefix)
    return _make_in(Path(tempfile.gettempdir()), prefix)


def _make_in(parent: Path, prefix: str) -> tuple[Path, int]:
    for _ in range(_ATTEMPTS):
        if parent.name == SOCKETS:
            parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            if (lock := _lock(path)) is not None:
                _sweep(parent, prefix)
                return path, lock
    raise SocketDirectoryError(
        f"no directory for sockets can be made in {parent}. Fix: make room there, or set XDG_RUNTIME_DIR",
        code="socket-directory-missing",
    )


def _sweep(parent: Path, prefix: str) -> None:
    """Removes the directories of killed jobs; one that cannot be removed stays."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if (lock := _lock(path)) is not None:
                try:
                    remove_own(path)
                finally:
                    os.close(lock)


def _lock(path: Path) -> int | None:
    """The descriptor of a directory that this process has locked; None if another holds it, user or process.

    Raises:
        OSError: there is no such directory, or it was removed meanwhile.
    """
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, descriptor)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            if found.st_uid == os.geteuid() and os.path.samestat(found, path.lstat()):
                stack.pop_all()
                return descriptor
    return None
