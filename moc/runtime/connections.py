"""Addresses of processes (``host:port``, ``[IPv6]:port`` or ``unix:/path``), and blocking connections to them."""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator

import psutil

from moc.errors import UserError
from moc.runtime.protocol import DEFAULT_BODY_LIMIT, Channel, Message, PeerGoneError, WireError

_UNIX = "unix:"
_MAX_PATH_BYTES = 100  # bytes; the kernel's structure has room for 107
_KEEPALIVE_S, _UNACKNOWLEDGED_MS = 5, 20_000
_BACKLOG = 256

HANDSHAKE_TIMEOUT_S = 5.0

RETRY_S = 0.05
"""Seconds between two attempts to connect."""

CONNECT_TIMEOUT_S = 60.0
"""Seconds for a process of the same node to start, or for a hung process to be restarted."""


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
    host, port, *more = socket_address
    scope = f"%{more[1]}" if more and more[1] else ""  # of a link-local address
    return f"[{host}{scope}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"


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


class Connection:
    """Message connection over a socket; created by :func:`connect`.

    Any thread may send, serialized by a lock; one thread receives. Any thread may close it, which wakes the others. A
    forked child must not use it, since both would reuse sequence numbers.

    Args:
        sock: connected blocking socket, TCP or Unix; closed with the connection.
        channel: open channel, owned by this connection.
        peer: name of the peer, for messages.
    """

    def __init__(self, sock: socket.socket, channel: Channel, peer: str):
        self.peer = peer
        self._socket, self._channel, self._closed = sock, channel, False
        self._messages: collections.deque[Message] = collections.deque()
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Sends a message; on return the kernel has all of it, and the body may be modified.

        Raises:
            WireError: the connection is closed; :class:`PeerGoneError` if the peer has disconnected.
            ValueError, TypeError: the message is invalid or exceeds the peer's body limit; nothing was sent.
        """
        with self._sending:
            buffers = self._channel.send(message)
            try:
                _send_all(self._socket, buffers)
            except OSError as error:  # stays open, because the peer's last messages may still be readable
                raise self._disconnected(error) from error
            except BaseException:  # a partially sent message makes the stream unusable
                self.close()
                raise

    def recv(self, timeout: float | None = None) -> Message:
        """Receives the next message.

        Args:
            timeout: seconds to wait; ``None`` waits forever. A partial message is kept for the next call.

        Raises:
            TimeoutError: no complete message arrived in time.
            PeerGoneError: the peer or this process has closed the connection.
            WireError: the peer violated the protocol; the connection is closed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._messages:
            self._wait_readable(deadline)
            try:
                data = self._socket.recv(self._channel.bytes_wanted)
            except OSError as error:
                raise self._disconnected(error) from error
            if not data:
                self._check_not_closed()
                self._channel.handle_end()
            try:
                self._messages.extend(self._channel.receive(data))
            except WireError:
                self.close()
                raise
        return self._messages.popleft()

    def fileno(self) -> int:
        """Returns the socket's descriptor; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the connection; threads blocked in :meth:`send` or :meth:`recv` get a :class:`PeerGoneError`."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # close() without shutdown wakes no blocked thread
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _wait_readable(self, deadline: float | None) -> None:
        if deadline is None:
            return  # recv() itself blocks
        # a socket timeout would also apply to sending threads
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:  # already closed
            self._check_not_closed()
            raise
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("no message has arrived in time")

    def _check_not_closed(self) -> None:
        if self._closed:
            raise PeerGoneError(f"this process has closed the connection with {self.peer}")

    def _disconnected(self, error: OSError) -> PeerGoneError:
        self._check_not_closed()
        return PeerGoneError(f"the connection with {self.peer} has broken: {socket_error_reason(error)}")


def connect(
    address: str, token: bytes, timeout: float = HANDSHAKE_TIMEOUT_S, body_limit: int = DEFAULT_BODY_LIMIT
) -> Connection:
    """Connects to a process of the same job, and authenticates it by the token.

    Args:
        address: ``host:port`` or ``unix:/path``.
        token: the job's secret, 32 bytes.
        timeout: seconds for connecting and the handshake together.
        body_limit: bytes of the largest body that this end accepts.

    Raises:
        PeerGoneError: no process listens at the address, or there was no answer in time.
        WireError: the peer does not belong to this job, or has another protocol version.
        ValueError: the address is malformed.
    """
    deadline = time.monotonic() + timeout
    channel = Channel(token, "client", body_limit, address)
    try:
        sock = _dial(address, deadline)
        try:
            _handshake(sock, channel, deadline)
            sock.settimeout(None)
        except BaseException:
            sock.close()
            raise
    except TimeoutError as error:
        raise PeerGoneError(f"{address} has not answered within {timeout:g} s") from error
    except OSError as error:
        raise PeerGoneError(f"{address} cannot be reached: {socket_error_reason(error)}") from error
    return Connection(sock, channel, address)


def retry_connect[T](
    attempt: Callable[[], T], timeout_s: float = CONNECT_TIMEOUT_S, except_cause: type[OSError] | tuple[()] = ()
) -> T:
    """Repeats an attempt to connect, because the peer may not listen yet or may have too many peers.

    Args:
        attempt: calls :func:`connect`; repeated if it raises :class:`PeerGoneError`.
        timeout_s: seconds after which the error is raised.
        except_cause: cause of an error that is raised immediately.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return attempt()
        except PeerGoneError as error:
            if isinstance(error.__cause__, except_cause) or time.monotonic() > deadline:
                raise
        time.sleep(RETRY_S)


def _dial(address: str, deadline: float) -> socket.socket:
    """Connects to the first address of a host that answers; each has an equal share of the remaining time."""
    failures, addresses = [OSError(f"{address} stands for no address")], resolve(address)
    for tried, (family, socket_address) in enumerate(addresses):
        sock = socket.socket(family, socket.SOCK_STREAM)
        now = time.monotonic()
        try:
            with short_socket_address(socket_address) as target:
                _connect(sock, target, now + (deadline - now) / (len(addresses) - tried))
            set_tcp_options(sock)
            return sock
        except OSError as error:
            sock.close()
            failures.append(error)
    raise decisive_failure(failures)


def decisive_failure(failures: list[OSError]) -> OSError:
    """Returns the error of a host with several addresses; it is a refusal only if all addresses refuse."""
    return next((error for error in failures[1:] if not isinstance(error, ConnectionRefusedError)), failures[-1])


def _connect(sock: socket.socket, socket_address: tuple | str, deadline: float) -> None:
    """Connects a socket; waits while a Unix socket's queue is full, which the kernel reports as an error."""
    while True:
        _set_timeout(sock, deadline)
        try:
            return sock.connect(socket_address)
        except BlockingIOError:
            time.sleep(RETRY_S)


def _handshake(sock: socket.socket, channel: Channel, deadline: float) -> None:
    while True:
        _set_timeout(sock, deadline)
        sock.sendall(channel.handshake_bytes())
        if channel.is_open:
            return
        if data := sock.recv(channel.bytes_wanted):
            channel.receive(data)
        else:
            channel.handle_end()


def _set_timeout(sock: socket.socket, deadline: float) -> None:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    sock.settimeout(remaining)


def _send_all(sock: socket.socket, buffers: list) -> None:
    views = [memoryview(buffer) for buffer in buffers]
    while views:
        sent = sock.sendmsg(views)
        while views and sent >= views[0].nbytes:
            sent -= views.pop(0).nbytes
        if views:
            views[0] = views[0][sent:]
