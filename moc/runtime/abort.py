"""Interrupts collectives that wait for a dead peer, which gloo and NCCL do not do themselves.

gloo has no abort.  Ranks connected to a dead peer detect its death.  A rank that waits for a live peer, which itself
waits for the dead one, is never woken.  Neither ``abort()`` nor ``shutdown()`` of the process group wakes it.  Shutting
down the connected sockets does: each pending operation then fails as if the peer had disconnected.  Listening sockets
must stay open: gloo terminates the process when they fail.

NCCL has ``ncclCommAbort``, which :meth:`ProcessGroupNCCL.abort` calls.  Kernels of one communicator may wait for
kernels of another.  So all communicators are aborted concurrently, one thread each.  Each is aborted exactly once,
because two aborts of one group deadlock.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator

NCCL_FLAGS = {
    # the watchdog must neither abort communicators nor terminate the process; 0 means no handling
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # its monitor must not do so either if the watchdog does not respond during an abort
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # a CUDA error rethrown in the watchdog's thread is uncaught there and would terminate the process
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # wait() must block only the stream, which an abort releases, not the process
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    # after an error the watchdog sleeps four times this long, holding the lock for enqueuing operations
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_FR_WAIT_TIMEOUT_DUMP_MILSEC": "0",  # the same variable in newer releases of torch
    # an error reported by another worker must not trigger a trace dump
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_FR_DUMP_ON_TIMEOUT": "0",
    # multicast memory (NVLink SHARP) belongs to all members of a group and cannot be freed without the dead one
    "NCCL_NVLS_ENABLE": "0",
}
"""Environment variables that :func:`abort_nccl` requires.  torch and NCCL read them when they connect a group."""


class AbortError(RuntimeError):
    """Failure to abort a group: the CUDA context is broken, and this process can create no other groups."""


def open_sockets() -> set[int]:
    """Returns the inodes of all open sockets of this process.  An inode identifies a socket for its lifetime."""
    return set(_inodes_by_descriptor().values())


def shut_down_sockets(inodes: Iterable[int]) -> int:
    """Shuts down connected TCP sockets, so that their users see a disconnected peer; returns their number.

    Descriptors stay open because other code owns them.

    Args:
        inodes: from :func:`open_sockets`; sockets closed since are skipped.
    """
    return sum(_shut_down_socket(sock) for _, sock in duplicate_sockets(inodes))


def duplicate_sockets(inodes: Iterable[int]) -> Iterator[tuple[int, socket.socket]]:
    """Yields duplicates of this process's TCP sockets with these inodes; the caller closes them."""
    requested = set(inodes)
    for descriptor, inode in _inodes_by_descriptor().items():
        if inode in requested and (sock := _duplicate_socket(descriptor, inode)) is not None:
            yield inode, sock


def abort_nccl(backends: list, timeout_s: float) -> None:
    """Aborts the communicators of every ``ProcessGroupNCCL`` concurrently.

    Kernels in flight terminate; the contents of their output buffers are undefined.

    Args:
        backends: groups to abort; each may be aborted only once.
        timeout_s: timeout in seconds for all groups together.

    Raises:
        AbortError: an abort failed or timed out.
    """
    failures: list[str] = []
    threads = [threading.Thread(target=_abort_backend, args=(backend, failures), daemon=True) for backend in backends]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    failures += [f"no answer within {timeout_s:g} s" for thread in threads if thread.is_alive()]
    if failures:
        count = f"{len(failures)} of {len(backends)}"
        raise AbortError(f"{count} NCCL groups could not be aborted: {failures[0]}")


def _abort_backend(backend, failures: list[str]) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        failures.append(str(error))


def _inodes_by_descriptor() -> dict[int, int]:
    """Returns socket inodes by file descriptor."""
    inodes = {int(name): _socket_inode(int(name)) for name in os.listdir("/proc/self/fd")}
    return {descriptor: inode for descriptor, inode in inodes.items() if inode is not None}


def _socket_inode(descriptor: int) -> int | None:
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None  # closed by another thread meanwhile
    return int(target[len("socket:[") : -1]) if target.startswith("socket:[") else None


def _duplicate_socket(descriptor: int, inode: int) -> socket.socket | None:
    """Returns a duplicate of a TCP socket; None if the descriptor was closed and perhaps reused meanwhile."""
    try:
        number = os.dup(descriptor)
    except OSError:
        return None
    try:
        copy = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        return None
    if _socket_inode(copy.fileno()) != inode or copy.family not in (socket.AF_INET, socket.AF_INET6):
        copy.close()
        return None
    return copy


def _shut_down_socket(sock: socket.socket) -> bool:
    with contextlib.closing(sock), contextlib.suppress(OSError):  # already disconnected
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False
