"""Waking whoever waits for a peer that will not answer: what gloo and NCCL leave to their users.

gloo has no abort.  A dead peer is noticed by those who are connected to it; who waits for a live peer, which itself
waits for the dead one, is never woken, and neither ``abort()`` nor ``shutdown()`` of the process group does it.  What
does is shutting down the connected sockets underneath: every pending operation then fails as if the peer had gone.
Sockets that listen must be left alone: gloo ends the process when they fail.

NCCL has one, ``ncclCommAbort``, which :meth:`ProcessGroupNCCL.abort` calls.  Kernels of a communicator may wait for
those of another, so all are aborted at the same time, each from a thread; and each only once, since two aborts of one
group wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable

NCCL_FLAGS = {
    # the watchdog must neither abort communicators by itself nor end the process: 0 is "no handling"
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # nor must its monitor, when the watchdog does not answer while communicators are being aborted
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # nor must an error of CUDA thrown in the watchdog's thread, where nobody catches it
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # wait() must not block the process: what waits is the stream, which an abort releases
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}
"""Environment variables under which :func:`abort_nccl` works; torch reads them when a group is connected."""


def open_sockets() -> set[int]:
    """Inodes of all sockets that this process has open.  An inode names a socket for the whole of its life."""
    return set(_sockets().values())


def shut_down(inodes: Iterable[int]) -> int:
    """Shuts down those sockets that are TCP and do not listen; who uses them sees a peer that has gone.

    Descriptors stay open: they belong to whoever opened them.

    Args:
        inodes: as :func:`open_sockets` gives them; those that are closed meanwhile are passed over.

    Returns:
        How many were shut down.
    """
    wanted = set(inodes)
    return sum(_shut_down(descriptor, inode) for descriptor, inode in _sockets().items() if inode in wanted)


def abort_nccl(backends: list, patience: float) -> None:
    """Aborts the communicators of every ``ProcessGroupNCCL`` at the same time.

    Kernels in flight end, whatever they have done so far: what they were to write is undefined.

    Args:
        backends: each aborted only once in its life.
        patience: seconds for all of them together.

    Raises:
        RuntimeError: one could not be aborted; its CUDA context is broken, and the process has to be replaced.
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
        raise RuntimeError(
            f"{len(failures)} of {len(backends)} NCCL groups could not be aborted, so this worker has to be "
            f"replaced: {failures[0]}"
        )


def _abort(backend, failures: list[str]) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        failures.append(str(error))


def _sockets() -> dict[int, int]:
    """Inode of each socket, by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        inode = _inode(int(name))
        if inode is not None:
            found[int(name)] = inode
    return found


def _inode(descriptor: int) -> int | None:
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None  # closed by another thread meanwhile
    return int(target[len("socket:[") : -1]) if target.startswith("socket:[") else None


def _shut_down(descriptor: int, inode: int) -> bool:
    try:
        number = os.dup(descriptor)
    except OSError:
        return False
    try:
        copy = socket.socket(fileno=number)
    except OSError:
        os.close(number)
        return False
    with contextlib.closing(copy):
        # the descriptor may have been closed and given to another socket; the copy keeps its own open
        if _inode(copy.fileno()) != inode or copy.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        with contextlib.suppress(OSError):  # not connected any more
            if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                copy.shutdown(socket.SHUT_RDWR)
                return True
    return False
