"""Process addresses: ``host:port``, ``[IPv6]:port``, ``unix:/path`` or ``unix:@name``.

``unix:@name`` is in Linux's abstract namespace: no file exists that could be removed, and only processes of the same
user are admitted.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import stat
import struct

import psutil

_UNIX = "unix:"
_PEER = struct.Struct("3i")  # process, user, group
_KEEPALIVE_S, _UNACKNOWLEDGED_MS = 5, 20_000
_BACKLOG = 256


def candidates(address: str) -> list[tuple[int, tuple | str]]:
    """Resolves an address to pairs of socket family and socket address, in the order to try.

    Raises:
        ValueError: the address is malformed.
        OSError: the host is unknown.
    """
    if address.startswith(_UNIX):
        path = address[len(_UNIX) :]
        return [(socket.AF_UNIX, "\0" + path[1:] if path.startswith("@") else path)]
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{address} is not an address: write host:port or unix:/path")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return [(family, where) for family, _, _, _, where in found]


def listening_socket(address: str, beyond_loopback: bool) -> socket.socket:
    """A non-blocking listening socket: on a port (0 for any free one), or a Unix socket that only its owner may use.

    Raises:
        ValueError: the address is malformed, or reachable from other machines without ``beyond_loopback``.
        OSError: the address cannot be bound.
    """
    family, where = candidates(address)[0]
    if family != socket.AF_UNIX and not beyond_loopback and not ipaddress.ip_address(where[0]).is_loopback:
        raise ValueError(f"other machines could connect to {address}: listen on 127.0.0.1, or set beyond_loopback")
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(where, str) and where.startswith("\0"):
            sock.bind(where)
        elif isinstance(where, str):
            _remove_left_over(where)
            sock.bind(where)
            os.chmod(where, 0o600)  # nobody can connect before listen()
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def interface_towards(address: str) -> str:
    """The local address from which a route to ``address`` leaves; nothing is sent.

    Raises:
        ValueError, OSError: as :func:`candidates`; also if the host is unreachable.
    """
    family, where = candidates(address)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        host = probe.getsockname()[0]
    return f"[{host}]" if family == socket.AF_INET6 else host


def name_of_interface(host: str) -> str | None:
    """Name of the network interface that has an IP address, as ``lo`` or ``eth0``; None if none has."""
    wanted = str(ipaddress.ip_address(host.strip("[]").partition("%")[0]))
    addresses = psutil.net_if_addrs().items()
    return next((name for name, those in addresses for one in those if one.address.partition("%")[0] == wanted), None)


def address_of_interface(name: str) -> str:
    """An IP address of a network interface, IPv4 if it has one, in brackets if not.

    Raises:
        OSError: there is no such interface, or it has no address.
    """
    those = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in those:
            if one.family == family:
                return f"[{one.address}]" if family == socket.AF_INET6 else one.address
    known = ", ".join(psutil.net_if_addrs())
    raise OSError(f"the network interface {name} has no address here: choose one of {known}")


def text_of(family: int, where: tuple | str | bytes) -> str:
    """Formats a socket address as :func:`candidates` reads it."""
    if isinstance(where, bytes):  # a name in the abstract namespace
        return f"{_UNIX}@{where[1:].decode()}"
    if isinstance(where, str):
        return _UNIX + where
    host, port = where[:2]
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"


def peer_of(sock: socket.socket) -> str:
    """Name of the peer of an accepted connection, for messages."""
    if sock.family == socket.AF_UNIX:  # a connecting Unix socket is unnamed
        return text_of(sock.family, sock.getsockname())
    try:
        return text_of(sock.family, sock.getpeername())
    except OSError:
        return "a peer that is gone"


def new_name() -> str:
    """A unique address in the abstract namespace of this machine."""
    return f"{_UNIX}@moc-{secrets.token_hex(8)}"


def is_ours(sock: socket.socket) -> bool:
    """Whether the peer of an accepted connection runs as this process's user; always true over TCP."""
    if sock.family != socket.AF_UNIX:
        return True
    _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return user == os.geteuid()


def set_up(sock: socket.socket) -> None:
    """Disables Nagle's algorithm, and enables keep-alive so that a vanished machine is detected; TCP only."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


def reason_of(error: OSError) -> str:
    """Readable reason of a socket error; asyncio words some of them differently."""
    if error.errno and error.errno > 0:  # resolver errors are numbered differently
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _remove_left_over(path: str) -> None:
    """Removes the socket file of a dead process; one with a listener stays."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
