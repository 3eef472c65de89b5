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

from moc.runtime.addresses import candidates, listening_socket, peer_of, reason_of, set_up, short, text_of
from moc.runtime.connections import AGAIN_S, HANDSHAKE_SECONDS
from moc.runtime.protocol import DEFAULT_BODY_LIMIT, READ_BYTES, Channel, Message, PeerGoneError, WireError

STRANGERS = 128
"""Most peers in the handshake at a time; the oldest is dropped to admit another."""

_PAUSE = 0.2  # seconds to wait after accept() failed, as when descriptors run out
_log = logging.getLogger(__name__)


class AsyncConnection:
    """Message connection over a socket, in one event loop; created by :func:`open` and :func:`serve`.

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
            raise self._gone(error) from error

    async def recv(self, silence: float | None = None) -> Message:
        """Receives the next message. Cancellation loses no data.

        Args:
            silence: timeout in seconds without any received byte, so a slow message does not time out. None: no limit.

        Raises:
            TimeoutError: no byte arrived within ``silence``.
            PeerGoneError: the peer has closed the connection.
            WireError: the peer violated the protocol; the connection is closed.
        """
        while not self._messages:
            try:
                await asyncio.wait_for(self._read(), silence)
            except TimeoutError as error:
                if getattr(error, "errno", None) is not None:  # ETIMEDOUT of the kernel: the peer's machine is down
                    raise self._gone(error) from error
                raise TimeoutError(f"{self.peer} has sent nothing for {silence:g} s") from None
            except OSError as error:
                raise self._gone(error) from error
        return self._messages.popleft()

    async def _read(self) -> None:
        data = await self._reader.read(READ_BYTES)
        if not data:
            self._channel.end()
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

    def _gone(self, error: OSError) -> PeerGoneError:
        return PeerGoneError(f"the connection with {self.peer} has broken: {reason_of(error)}")


async def open(
    address: str, token: bytes, timeout: float = HANDSHAKE_SECONDS, body_limit: int = DEFAULT_BODY_LIMIT
) -> AsyncConnection:
    """Connects to a process of the same job, and authenticates it by the token.

    Arguments and errors are the same as for :func:`moc.runtime.connections.connect`.
    """
    channel = Channel(token, "client", body_limit, address)
    try:
        sock = await asyncio.wait_for(_dial(address, channel), timeout)
    except TimeoutError as error:
        raise PeerGoneError(f"{address} has not answered within {timeout:g} s") from error
    except OSError as error:
        raise PeerGoneError(f"{address} cannot be reached: {reason_of(error)}") from error
    return await _connection(sock, channel, address)


async def ask(address: str, token: bytes, timeout: float) -> dict:
    """Sends a health check to a process and returns the header of its answer.

    Raises:
        WireError: the process cannot be reached, or does not belong to this job.
        TimeoutError: the process has not answered within ``timeout`` seconds.
    """
    connection = await open(address, token, timeout)
    try:
        await connection.send(Message({"kind": "ask"}))
        return (await connection.recv(silence=timeout)).header
    finally:
        connection.abort()


class RefusalLog:
    """Rate-limited log of refused peers, which counts excess peers instead of logging them."""

    def __init__(self, most: int = 20, every_s: float = 10.0):
        self._most, self._every_s = most, every_s
        self._since, self._count = -math.inf, 0

    def __call__(self, peer: str, sentence: str) -> None:
        """Logs the refusal of a peer with a one-sentence reason; called by one thread."""
        now = time.monotonic()
        if now - self._since > self._every_s:
            if self._count > self._most:
                _log.warning("refused %d more peers, in %.0f s", self._count - self._most, now - self._since)
            self._since, self._count = now, 0
        self._count += 1
        if self._count <= self._most:
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
    handshake_timeout: float = HANDSHAKE_SECONDS,
    beyond_loopback: bool = False,
    listener: socket.socket | None = None,
) -> Server:
    """Listens for processes of the same job.

    Args:
        address: as for :func:`~moc.runtime.addresses.listening_socket`, whose errors this function raises.
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
        address = text_of(listener.family, listener.getsockname())
    return Server(address, listener, token, on_connection, on_refused, body_limit, handshake_timeout)


class Server:
    """Server at ``address``, returned by :func:`serve`; as an asynchronous context manager it closes itself."""

    def __init__(self, address, listener, token, on_connection, on_refused, body_limit, handshake_timeout):
        self.address = address
        self._listener, self._token, self._body_limit = listener, token, body_limit
        self._on_connection, self._on_refused, self._timeout = on_connection, on_refused, handshake_timeout
        self._strangers: dict[asyncio.Task, str] = {}  # oldest first
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
                self._on_refused("a peer", f"it could not be accepted: {reason_of(error)}")
                await asyncio.sleep(_PAUSE)
                continue
            self._make_room()
            peer = peer_of(sock, self.address)
            task = asyncio.create_task(self._serve(sock, peer))
            self._strangers[task] = peer
            self._tasks.add(task)
            task.add_done_callback(self._done)
            await asyncio.sleep(0)  # lets the task start, because cancelling an unstarted task would leak the socket

    def _make_room(self) -> None:
        if len(self._strangers) >= STRANGERS:
            task = next(iter(self._strangers))
            self._on_refused(self._strangers.pop(task), f"it made room: {STRANGERS} peers are in the handshake")
            task.cancel()

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        channel = Channel(self._token, "server", self._body_limit)
        try:
            await self._let_in(sock, channel)
        except WireError as error:
            sock.close()
            self._on_refused(peer, str(error))
            return
        except BaseException:
            sock.close()
            raise
        own = asyncio.current_task()
        assert own is not None  # in a coroutine
        self._strangers.pop(own, None)
        connection = await _connection(sock, channel, peer)
        try:
            await self._on_connection(connection)
        except PeerGoneError:
            pass  # a disconnect is not an error
        except WireError as error:
            self._on_refused(peer, str(error))
        finally:
            connection.close()

    async def _let_in(self, sock: socket.socket, channel: Channel) -> None:
        try:
            set_up(sock)
            await asyncio.wait_for(_shake_hands(sock, channel), self._timeout)
        except TimeoutError as error:
            raise PeerGoneError(f"the peer has not proved itself within {self._timeout:g} s") from error
        except OSError as error:
            raise PeerGoneError(f"the connection broke during the handshake: {reason_of(error)}") from error

    def _done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self._strangers.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            task.get_loop().call_exception_handler({"message": "serving a connection failed", "exception": error})


async def _dial(address: str, channel: Channel) -> socket.socket:
    failure = OSError(f"{address} stands for no address")
    for family, where in await asyncio.to_thread(candidates, address):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            with short(where) as target:
                await _connect(sock, target)
            set_up(sock)
            await _shake_hands(sock, channel)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


async def _connect(sock: socket.socket, where: tuple | str) -> None:
    """Connects a socket; waits while a Unix socket's queue is full, which asyncio would treat as connected."""
    while sock.family == socket.AF_UNIX:
        try:
            return sock.connect(where)
        except BlockingIOError:
            await asyncio.sleep(AGAIN_S)
    await asyncio.get_running_loop().sock_connect(sock, where)


async def _shake_hands(sock: socket.socket, channel: Channel) -> None:
    """Performs the handshake on the socket; a stream would read too much from an unauthenticated peer."""
    loop = asyncio.get_running_loop()
    while True:
        await loop.sock_sendall(sock, channel.handshake_bytes())
        if channel.is_open:
            return
        if data := await loop.sock_recv(sock, channel.wants):
            channel.receive(data)
        else:
            channel.end()


async def _connection(sock: socket.socket, channel: Channel, peer: str) -> AsyncConnection:
    try:
        reader, writer = await asyncio.open_connection(sock=sock, limit=READ_BYTES)
    except BaseException:
        sock.close()
        raise
    writer.transport.set_write_buffer_limits(high=0)  # drain() waits until the kernel has everything
    return AsyncConnection(reader, writer, channel, peer)
