"""Keeps strangers out of gloo, whose sockets take whoever connects and names a small number.

Workers tell one another over the store, which knows who they are, what their connections are: each is at both of its
ends, seen from either side.  One that no worker has at its other end is a stranger's, and is cut.  Once all are
connected, the listening sockets take nobody else.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any

from moc.runtime.abort import shut_down, sockets_of

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER of asm-generic/socket.h
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # linux/filter.h: BPF_RET | BPF_K, 0 bytes of the packet


def meet(store: Any, key: str, inodes: Iterable[int], wait_for_all: Callable[[], None]) -> int:
    """Cuts connections that no worker of the job has the other end of.  All workers of the rendezvous call it.

    Args:
        store: ``torch.distributed.Store`` of the rendezvous, which strangers cannot reach.
        key: prefix of this rendezvous.
        inodes: sockets that were made for it, from :func:`~moc.runtime.abort.open_sockets`.
        wait_for_all: returns when all workers have called it.

    Returns:
        The number of connections with workers.
    """
    ends: dict[int, tuple[str, str]] = {}
    for inode, sock in sockets_of(inodes):
        with sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                _take_nobody(sock)
                continue
            try:
                here, there = (f"{host}:{port}" for host, port, *_ in (sock.getsockname(), sock.getpeername()))
            except OSError:  # it is gone again
                continue
            ends[inode] = here, there
    store.multi_set([f"{key}/{here}-{there}" for here, there in ends.values()], [""] * len(ends))
    wait_for_all()
    mirrored = {inode: f"{key}/{there}-{here}" for inode, (here, there) in ends.items()}
    if not mirrored or store.check(list(mirrored.values())):
        return len(mirrored)
    strangers = [inode for inode, mirror in mirrored.items() if not store.check([mirror])]
    shut_down(strangers)
    return len(mirrored) - len(strangers)


def _take_nobody(listener: socket.socket) -> None:
    """Has the kernel drop what comes to a listening socket, which must stay: gloo ends the process if it fails."""
    program = ctypes.create_string_buffer(_DROP_ALL)
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
