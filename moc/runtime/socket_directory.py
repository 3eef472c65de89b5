"""Creates the directory of a node's Unix sockets, which other users cannot enter.

It has mode 0700.  Its path is ``/dev/shm/moc-UID/.sockets/NAME``, in the user's directory of a memory file system
(:func:`moc.store.host_memory.user_directory`).  If that is impossible, it is a temporary directory.  The creating
process holds a lock on it, which the kernel releases when the process dies.  A directory without a lock is left over
from a killed job, and the next job of the user removes it.
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
from moc.files.safe_directory import SafeDirectory, remove_owned
from moc.store.errors import CheckpointError
from moc.store.host_memory import SOCKETS_DIRECTORY, user_directory

_MEMORY = "/dev/shm"
_ATTEMPTS = 100  # another job may remove a new directory before it is locked


def memory_directory_of(command: list[str]) -> str:
    """Returns the memory file system in ``--ckpt-memory-dir`` of a program's command line, or ``/dev/shm``."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ckpt-memory-dir", nargs="?")
    return parser.parse_known_args(command[1:])[0].ckpt_memory_dir or _MEMORY


class SocketDirectoryError(UserError, OSError):
    """No directory can be created for the sockets of this node."""


@contextlib.contextmanager
def socket_directory(memory_dir: str = _MEMORY) -> Iterator[Path]:
    """Creates a directory for sockets, and removes it at the end; also removes the directories of killed jobs.

    Args:
        memory_dir: memory file system to use, if possible.

    Raises:
        OSError: no directory can be created, not even a temporary one.
    """
    path, lock = _create(memory_dir)
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            remove_owned(path)
        os.close(lock)
        if path.parent.name == SOCKETS_DIRECTORY:  # other jobs may have directories there
            with contextlib.suppress(OSError):
                SafeDirectory(path.parent.parent).remove_if_empty(SOCKETS_DIRECTORY)


def _create(memory_dir: str) -> tuple[Path, int]:
    """Creates a directory in the first possible location; returns it and the descriptor of its lock."""
    for memory in dict.fromkeys((memory_dir, _MEMORY)):
        with contextlib.suppress(CheckpointError, OSError):
            return _create_in(user_directory(memory).absolute() / SOCKETS_DIRECTORY, "")
    prefix = f"moc-sockets-{os.geteuid()}-"
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        with contextlib.suppress(OSError):
            return _create_in(Path(runtime), prefix)
    return _create_in(Path(tempfile.gettempdir()), prefix)


def _create_in(parent: Path, prefix: str) -> tuple[Path, int]:
    for _ in range(_ATTEMPTS):
        if parent.name == SOCKETS_DIRECTORY:
            parent.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            if (lock := _lock(path)) is not None:
                _remove_abandoned(parent, prefix)
                return path, lock
    raise SocketDirectoryError(
        f"no directory for sockets can be made in {parent}. Fix: make room there, or set XDG_RUNTIME_DIR",
        code="socket-directory-missing",
    )


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Removes the directories of killed jobs; one that cannot be removed stays."""
    for path in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if (lock := _lock(path)) is not None:
                try:
                    remove_owned(path)
                finally:
                    os.close(lock)


def _lock(path: Path) -> int | None:
    """Returns the descriptor of a directory that this process has locked; None if another process or user owns it.

    Raises:
        OSError: there is no such directory, or it was removed meanwhile.
    """
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, descriptor)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            status = os.fstat(descriptor)
            if status.st_uid == os.geteuid() and os.path.samestat(status, path.lstat()):
                stack.pop_all()
                return descriptor
    return None
