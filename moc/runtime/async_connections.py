"""Provides asyncio connections for controllers and agents, with one thread for many peers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable

from moc.runtime.connections import (
    HANDSHAKE_TIMEOUT_S,
    RETRY_S,
    decisive_failure,
    format_address,
    listening_socket,
    peer_name,
    resolve,
    set_tcp_options,
    short_socket_address,
    socket_error_reason,
)
from moc.runtime.protocol import DEFAULT_BODY_LIMIT, READ_BYTES, Channel, Message, PeerGoneError, WireError

MAX_HANDSHAKES = 128
"""Most peers in the handshake at a time; the oldest is dropped to admit another."""

_ACCEPT_RETRY_S = 0.2  # seconds to wait after accept() failed, as when descriptors run out
_log = logging.getLogger(__name__)


class AsyncConnection:
    """Message connection over a socket, in one event loop; created by :func:`open_connection` and :func:`serve`.

    Any task may send; one task receives. Computing a MAC blocks the event loop for about 0.6 ms per MiB of body.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, channel: Channel, peer: str):
        self.peer = peer
        self._reader, self._writer, self._channel = reader, writer, channel
        self._messages: collections.deque[Message] = collections.deque()

    def post(self, message: Message) -> None:
        """Queues a message without waiting; unsent bytes stay in memory.

        Raises:
            WireError: the connection is closed; :class:`PeerGoneError` if the peer has disconnected.
            ValueError, TypeError: the message is invalid or exceeds the peer's body limit; nothing was sent.
        """
        if self._writer.is_closing():
            raise PeerGoneError(f"the connection with {self.peer} is closed")
        self._writer.write(b"".join(self._channel.send(message)))

    async def send(self, message: Message) -> None:
        """Sends a message like :meth:`post`, and waits until the kernel has all of it."""
        self.post(message)
        try:
            await self._writer.drain()
        except OSError as error:
            raise self._disconnected(error) from error

    async def recv(self, silence_s: float | None = None) -> Message:
        """Receives the next message. Cancellation loses no data.

        Args:
            silence_s: timeout in seconds without any received byte, so a slow message does not time out. None: no
                limit.

        Raises:
            TimeoutError: no byte arrived within ``silence_s``.
            PeerGoneError: the peer has closed the connection.
            WireError: the peer violated the protocol; the connection is closed.
        """
        while not self._messages:
            try:
                await asyncio.wait_for(self._read(), silence_s)
            except TimeoutError as error:
                if getattr(error, "errno", None) is not None:  # ETIMEDOUT of the kernel: the peer's machine is down
                    raise self._disconnected(error) from error
                raise TimeoutError(f"{self.peer} has sent nothing for {silence_s:g} s") from None
            except OSError as error:
                raise self._disconnected(error) from error
        return self._messages.popleft()

    async def _read(self) -> None:
        data = await self._reader.read(READ_BYTES)
        if not data:
            self._channel.handle_end()
        try:
            self._messages.extend(self._channel.receive(data))
        except WireError:
            self.abort()
            raise

    def close(self) -> None:
        """Closes the connection once all posted messages are sent."""
        self._writer.close()

    def abort(self) -> None:
        """Closes the connection immediately, without flushing."""
        self._writer.transport.abort()

    def _disconnected(self, error: OSError) -> PeerGoneError:
        return PeerGoneError(f"the connection with {self.peer} has broken: {socket_error_reason(error)}")


async def open_connection(
    address: str, token: bytes, timeout: float = HANDSHAKE_TIMEOUT_S, body_limit: int = DEFAULT_BODY_LIMIT
) -> AsyncConnection:
    """Connects to a process of the same job, and authenticates it by the token.

    Arguments and errors are the same as for :func:`moc.runtime.connections.connect`.
    """
    channel = Channel(token, "client", body_limit, address)
    try:
        sock = await asyncio.wait_for(_open_socket(address, channel, timeout), timeout)
    except TimeoutError as error:
        raise PeerGoneError(f"{address} has not answered within {timeout:g} s") from error
    except OSError as error:
        raise PeerGoneError(f"{address} cannot be reached: {socket_error_reason(error)}") from error
    return await _wrap_socket(sock, channel, address)


async def check_health(address: str, token: bytes, timeout: float) -> dict:
    """Sends a health check to a process and returns the header of its answer.

    Raises:
        WireError: the process cannot be reached, or does not belong to this job.
        TimeoutError: the process has not answered within ``timeout`` seconds.
    """
    connection = await open_connection(address, token, timeout)
    try:
        await connection.send(Message({"kind": "ask"}))
        return (await connection.recv(silence_s=timeout)).header
    finally:
        connection.abort()


class RefusalLog:
    """Rate-limited log of refused peers, which counts excess peers instead of logging them."""

    def __init__(self, limit: int = 20, interval_s: float = 10.0):
        self._limit, self._interval_s = limit, interval_s
        self._since, self._count = -math.inf, 0

    def __call__(self, peer: str, sentence: str) -> None:
        """Logs the refusal of a peer with a one-sentence reason; called by one thread."""
        now = time.monotonic()
        if now - self._since > self._interval_s:
            if self._count > self._limit:
                _log.warning("refused %d more peers, in %.0f s", self._count - self._limit, now - self._since)
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= self._limit:
            _log.warning("refused %s: %s", peer, sentence)


log_refusal = RefusalLog()
"""Refusal log of this process."""


async def serve(
    address: str,
    token: bytes,
    on_connection: Callable[[AsyncConnection], Awaitable[None]],
    *,
    on_refused: Callable[[str, str], None] = log_refusal,
    body_limit: int = DEFAULT_BODY_LIMIT,
    handshake_timeout: float = HANDSHAKE_TIMEOUT_S,
    beyond_loopback: bool = False,
    listener: socket.socket | None = None,
) -> Server:
    """Listens for processes of the same job.

    Args:
        address: as for :func:`~moc.runtime.connections.listening_socket`, whose errors this function raises.
        token: the job's secret, 32 bytes.
        on_connection: called with every authenticated peer. The connection is closed when it returns. It may raise
            :class:`WireError`; any other exception goes to the event loop's handler.
        on_refused: called with a peer that was refused or later violated the protocol, and a one-sentence reason.
        body_limit: largest accepted body in bytes.
        handshake_timeout: seconds for a peer to authenticate.
        beyond_loopback: allows an address that other machines can reach.
        listener: an existing listening socket, which replaces ``address``.
    """
    listener = listener or listening_socket(address, beyond_loopback)
    listener.setblocking(False)
    if listener.family != socket.AF_UNIX:  # port 0 is resolved now; the kernel has another name for a long Unix path
        address = format_address(listener.family, listener.getsockname())
    return Server(address, listener, token, on_connection, on_refused, body_limit, handshake_timeout)


class Server:
    """Server at ``address``, returned by :func:`serve`; as an asynchronous context manager it closes itself."""

    def __init__(self, address, listener, token, on_connection, on_refused, body_limit, handshake_timeout):
        self.address = address
        self._listener, self._token, self._body_limit = listener, token, body_limit
        self._on_connection, self._on_refused, self._timeout = on_connection, on_refused, handshake_timeout
        self._handshakes: dict[asyncio.Task, str] = {}  # oldest first
        self._tasks: set[asyncio.Task] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Stops listening, cancels all handlers, and closes their connections."""
        if self._listener.family == socket.AF_UNIX:  # first, because later the file may belong to the next server
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix("unix:"))
        tasks = [self._accepting, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                self._on_refused("a peer", f"it could not be accepted: {socket_error_reason(error)}")
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            self._drop_oldest_handshake()
            peer = peer_name(sock, self.address)
            task = asyncio.create_task(self._serve(sock, peer))
            self._handshakes[task] = peer
            self._tasks.add(task)
            task.add_done_callback(self._finish)
            await asyncio.sleep(0)  # lets the task start, because cancelling an unstarted task would leak the socket

    def _drop_oldest_handshake(self) -> None:
        if len(self._handshakes) >= MAX_HANDSHAKES:
            task = next(iter(self._handshakes))
            self._on_refused(self._handshakes.pop(task), f"it made room: {MAX_HANDSHAKES} peers are in the handshake")
            task.cancel()

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        channel = Channel(self._token, "server", self._body_limit)
        try:
            await self._authenticate(sock, channel)
        except WireError as error:
            sock.close()
            self._on_refused(peer, str(error))
            return
        except BaseException:
            sock.close()
            raise
        task = asyncio.current_task()
        assert task is not None  # in a coroutine
        self._handshakes.pop(task, None)
        connection = await _wrap_socket(sock, channel, peer)
        try:
            await self._on_connection(connection)
        except PeerGoneError:
            pass  # a disconnect is not an error
        except WireError as error:
            self._on_refused(peer, str(error))
        finally:
            connection.close()

    async def _authenticate(self, sock: socket.socket, channel: Channel) -> None:
        try:
            set_tcp_options(sock)
            await asyncio.wait_for(_handshake(sock, channel), self._timeout)
        except TimeoutError as error:
            raise PeerGoneError(f"the peer has not proved itself within {self._timeout:g} s") from error
        except OSError as error:
            raise PeerGoneError(f"the connection broke during the handshake: {socket_error_reason(error)}") from error

    def _finish(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self._handshakes.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": "serving a connection failed", "exception": error})


async def _open_socket(address: str, channel: Channel, timeout: float) -> socket.socket:
    sock = await _dial(address, timeout)
    try:
        await _handshake(sock, channel)
    except BaseException:
        sock.close()
        raise
    return sock


async def _dial(address: str, timeout: float) -> socket.socket:
    """Connects to the first address of a host that answers; each has an equal share of the remaining time."""
    deadline, addresses = time.monotonic() + timeout, await asyncio.to_thread(resolve, address)
    failures = [OSError(f"{address} stands for no address")]
    for tried, (family, socket_address) in enumerate(addresses):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            with short_socket_address(socket_address) as target:
                share = (deadline - time.monotonic()) / (len(addresses) - tried)
                await asyncio.wait_for(_connect(sock, target), share)
            set_tcp_options(sock)
            return sock
        except OSError as error:  # a timeout, too
            sock.close()
            failures.append(error)
        except BaseException:
            sock.close()
            raise
    raise decisive_failure(failures)


async def _connect(sock: socket.socket, socket_address: tuple | str) -> None:
    """Connects a socket; waits while a Unix socket's queue is full, which asyncio would treat as connected."""
    while sock.family == socket.AF_UNIX:
        try:
            return sock.connect(socket_address)
        except BlockingIOError:
            await asyncio.sleep(RETRY_S)
    await asyncio.get_running_loop().sock_connect(sock, socket_address)


async def _handshake(sock: socket.socket, channel: Channel) -> None:
    """Performs the handshake on the socket; a stream would read too much from an unauthenticated peer."""
    loop = asyncio.get_running_loop()
    while True:
        await loop.sock_sendall(sock, channel.handshake_bytes())
        if channel.is_open:
            return
        if data := await loop.sock_recv(sock, channel.bytes_wanted):
            channel.receive(data)
        else:
            channel.handle_end()


async def _wrap_socket(sock: socket.socket, channel: Channel, peer: str) -> AsyncConnection:
    try:
        reader, writer = await asyncio.open_connection(sock=sock, limit=READ_BYTES)
    except BaseException:
        sock.close()
        raise
    writer.transport.set_write_buffer_limits(high=0)  # drain() waits until the kernel has everything
    return AsyncConnection(reader, writer, channel, peer)
