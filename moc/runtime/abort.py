"""Interrupts collectives that wait for a dead peer; gloo and NCCL leave this to their users.

gloo has no abort.  Ranks connected to a dead peer notice it; a rank that waits for a live peer, which itself waits for
the dead one, is never woken, and neither ``abort()`` nor ``shutdown()`` of the process group wakes it.  Shutting down
the underlying connected sockets does: every pending operation then fails as if the peer had gone. Listening sockets
must be left alone: gloo terminates the process when they fail.

NCCL has ``ncclCommAbort``, which :meth:`ProcessGroupNCCL.abort` calls.  Kernels of one communicator may wait for those
of another, so all are aborted concurrently, one thread each, and each exactly once, since two aborts of one group
deadlock.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator

NCCL_FLAGS = {
    # the watchdog must neither abort communicators nor terminate the process: 0 is "no handling"
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # nor must its monitor, if the watchdog does not respond while communicators are being aborted
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # nor must a CUDA error rethrown in the watchdog's thread, where it is uncaught
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # wait() must block the stream only, which an abort releases, not the process
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # after an error the watchdog sleeps four times this long, with the lock that enqueuing an operation takes
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # its name in newer releases of torch
    # nor must a worker dump traces because another one has reported an error
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_DUMP_ON_TIMEOUT": "0",
    # multicast memory (NVLink SHARP) belongs to all members of a group: it cannot be torn down without the dead one
    "NCCL_NVLS_ENABLE": "0",
}
"""Environment variables that :func:`abort_nccl` requires; torch and NCCL read them when a group is connected."""


class AbortError(RuntimeError):
    """A group could not be aborted: the CUDA context is broken, and this process can have no other groups."""


def open_sockets() -> set[int]:
    """Inodes of all open sockets of this process.  An inode identifies a socket for its whole lifetime."""
    return set(_sockets().values())


def shut_down(inodes: Iterable[int]) -> int:
    """Shuts down connected TCP sockets, so that their users see a peer that has gone; returns how many.

    Descriptors stay open: they belong to their owners.

    Args:
        inodes: from :func:`open_sockets`; sockets closed since are skipped.
    """
    return sum(_shut_down(sock) for _, sock in sockets_of(inodes))


def sockets_of(inodes: Iterable[int]) -> Iterator[tuple[int, socket.socket]]:
    """Duplicates of this process's TCP sockets with these inodes, to be closed by the caller."""
    wanted = set(inodes)
    for descriptor, inode in _sockets().items():
        if inode in wanted and (sock := _duplicate(descriptor, inode)) is not None:
            yield inode, sock


def abort_nccl(backends: list, patience: float) -> None:
    """Aborts the communicators of every ``ProcessGroupNCCL`` concurrently.

    Kernels in flight terminate; the contents of their output buffers are undefined.

    Args:
        backends: groups to abort; each may be aborted only once.
        patience: seconds for all of them together.

    Raises:
        AbortError: an abort failed or timed out.
    """
    failures: list[str] = []
    threads = [threading.Thread(target=_abort, args=(backend, failures), daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    failures += [f"no answer within {patience:g} s" for thread in threads if thread.is_alive()]
    if failures:
        count = f"{len(failures)} of {len(backends)}"
        raise AbortError(f"{count} NCCL groups could not be aborted: {failures[0]}")


def _abort(backend, failures: list[str]) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        failures.append(str(error))


def _sockets() -> dict[int, int]:
    """Socket inodes by file descriptor."""
    inodes = {int(name): _inode(int(name)) for name in os.listdir("/proc/self/fd")}
    return {descriptor: inode for descriptor, inode in inodes.items() if inode is not None}


def _inode(descriptor: int) -> int | None:
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None  # closed by another thread meanwhile
    return int(target[len("socket:[") : -1]) if target.startswith("socket:[") else None


def _duplicate(descriptor: int, inode: int) -> socket.socket | None:
    """A duplicate of a TCP socket; None if the descriptor was closed and perhaps reused meanwhile."""
    try:
        number = os.dup(descriptor)
    except OSError:
        return None
    try:
        copy = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        return None
    if _inode(copy.fileno()) != inode or copy.family not in (socket.AF_INET, socket.AF_INET6):
        copy.close()
        return None
    return copy


def _shut_down(sock: socket.socket) -> bool:
    with contextlib.closing(sock), contextlib.suppress(OSError):  # already disconnected
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False
