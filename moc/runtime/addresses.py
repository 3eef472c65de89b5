"""Parses, formats and binds process addresses: ``host:port``, ``[IPv6]:port`` or ``unix:/path``."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator

import psutil

from moc.errors import UserError

_UNIX = "unix:"
_MAX_PATH_BYTES = 100  # bytes; the kernel's structure has room for 107
_KEEPALIVE_S, _UNACKNOWLEDGED_MS = 5, 20_000
_BACKLOG = 256


class AddressError(UserError, ValueError):
    """Malformed address, or an address that must not be listened on."""


class InterfaceError(UserError, OSError):
    """Missing network interface, or one without an address."""


def resolve(address: str) -> list[tuple[int, tuple | str]]:
    """Resolves an address to pairs of socket family and socket address, in order of preference.

    Raises:
        ValueError: the address is malformed.
        OSError: the host is unknown.
    """
    if address.startswith(_UNIX):
        return [(socket.AF_UNIX, address[len(_UNIX) :])]
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise AddressError(
            f"{address} is not an address. Fix: write host:port or unix:/path",
            code="address-invalid",
        )
    infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return [(family, where) for family, _, _, _, where in infos]


def listening_socket(address: str, beyond_loopback: bool) -> socket.socket:
    """Returns a non-blocking listening socket: a port (0 for any free one), or a Unix socket for its owner only.

    Raises:
        ValueError: the address is malformed, or reachable from other machines without ``beyond_loopback``.
        OSError: the address cannot be bound.
    """
    family, socket_address = resolve(address)[0]
    if family != socket.AF_UNIX and not beyond_loopback and not ipaddress.ip_address(socket_address[0]).is_loopback:
        raise AddressError(
            f"other machines could connect to {address}. Fix: listen on 127.0.0.1, or pass --beyond-loopback",
            code="address-exposed",
        )
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(socket_address, str):
            _remove_stale_socket(socket_address)
            with short_socket_address(socket_address) as path:
                sock.bind(path)
            os.chmod(socket_address, 0o600)  # no peer can connect before listen()
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(socket_address)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def is_loopback(host: str) -> bool:
    """Whether a host name or address is one of this machine that no other machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def short_socket_address(socket_address: tuple | str) -> Iterator[tuple | str]:
    """Yields a socket address that ``bind`` and ``connect`` accept for a Unix socket path of any length.

    A path over 100 bytes becomes ``/proc/self/fd/N/NAME``, where N is a descriptor of its directory.  The alternatives
    have side effects: the working directory is shared by all threads, and a temporary symbolic link may be left over.

    Raises:
        OSError: the directory of a long path does not exist, or cannot be entered.
    """
    if isinstance(socket_address, tuple) or len(os.fsencode(socket_address)) <= _MAX_PATH_BYTES:
        yield socket_address
        return
    directory, name = os.path.split(socket_address)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def local_address_towards(address: str) -> str:
    """Returns the local address of the route to ``address``; sends nothing.

    Raises:
        ValueError, OSError: as :func:`resolve`; also if the host is unreachable.
    """
    family, socket_address = resolve(address)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(socket_address)
        host = probe.getsockname()[0]
    return f"[{host}]" if family == socket.AF_INET6 else host


def interface_name(host: str) -> str | None:
    """Returns the name of the network interface with an IP address, such as ``eth0``; None if there is none."""
    wanted = str(ipaddress.ip_address(host.strip("[]").partition("%")[0]))
    addresses = psutil.net_if_addrs().items()
    return next((name for name, those in addresses for one in those if one.address.partition("%")[0] == wanted), None)


def interface_address(name: str) -> str:
    """Returns an IP address of a network interface: IPv4 if it has one, otherwise IPv6 in brackets.

    Raises:
        OSError: there is no such interface, or it has no address.
    """
    addresses = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in addresses:
            if one.family == family:
                return f"[{one.address}]" if family == socket.AF_INET6 else one.address
    known = ", ".join(psutil.net_if_addrs())
    raise InterfaceError(
        f"the network interface {name} has no address here. Fix: choose one of {known}",
        code="network-interface-missing",
    )


def format_address(family: int, socket_address: tuple | str) -> str:
    """Formats a socket address as :func:`resolve` reads it."""
    if isinstance(socket_address, str):
        return _UNIX + socket_address
    host, port = socket_address[:2]
    return f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"


def peer_name(sock: socket.socket, address: str) -> str:
    """Returns the name, for messages, of the peer of a connection accepted at an address."""
    if sock.family == socket.AF_UNIX:  # a connecting Unix socket is unnamed
        return address
    try:
        return format_address(sock.family, sock.getpeername())
    except OSError:
        return "a peer that is gone"


def set_tcp_options(sock: socket.socket) -> None:
    """Disables Nagle's algorithm and enables keep-alive, which detects a lost machine; TCP only."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, option, _KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


def socket_error_reason(error: OSError) -> str:
    """Returns a readable reason of a socket error; asyncio words some of them differently."""
    if error.errno and error.errno > 0:  # resolver errors are numbered differently
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _remove_stale_socket(path: str) -> None:
    """Removes the socket file of a dead process; keeps a file with a listener."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, short_socket_address(path) as where:
            probe.setblocking(False)
            try:
                probe.connect(where)
            except ConnectionRefusedError:
                os.unlink(path)
            except BlockingIOError:  # a full queue proves that there is a listener
                pass
