"""Provides blocking connections for the threads of workers."""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable

from moc.runtime.addresses import resolve, set_tcp_options, short_socket_address, socket_error_reason
from moc.runtime.protocol import DEFAULT_BODY_LIMIT, Channel, Message, PeerGoneError, WireError

HANDSHAKE_TIMEOUT_S = 5.0

RETRY_S = 0.05
"""Seconds between two attempts to connect."""

CONNECT_TIMEOUT_S = 60.0
"""Seconds for a process of the same node to start, or for a hung process to be restarted."""


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
    failure = OSError(f"{address} stands for no address")
    for family, socket_address in resolve(address):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            with short_socket_address(socket_address) as target:
                _connect(sock, target, deadline)
            set_tcp_options(sock)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure


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
