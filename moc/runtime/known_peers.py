"""Disconnects unauthenticated peers from gloo, whose sockets accept any client that sends a small number.

Workers list their connections in the rendezvous store, which authenticates them.  A connection between two workers is
listed from both ends.  A connection without the other end belongs to an unauthenticated peer, and is cut.  Once all
workers are connected, the listening sockets accept no more.
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
    """Cuts connections whose other end is no worker of the job.  All workers of the rendezvous call it.

    Args:
        store: ``torch.distributed.Store`` of the rendezvous, not accessible to unauthenticated peers.
        key: prefix of this rendezvous.
        inodes: sockets created for it, from :func:`~moc.runtime.abort.open_sockets`.
        wait_for_all: function that returns when all workers have called it.

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
            except OSError:  # already disconnected
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
    """Lets the kernel drop packets to a listening socket.  It stays open, because gloo ends the process if it fails."""
    program = ctypes.create_string_buffer(_DROP_ALL)
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
