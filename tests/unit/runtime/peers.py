"""Both ends of the wire for tests: channels that are open, and a server in a thread of its own."""

import asyncio
import contextlib
import queue
import socket
import threading

from moc.runtime.async_connections import serve
from moc.runtime.protocol import Channel, Message

TOKEN = bytes(range(32))
OTHER_TOKEN = bytes(32)


def shake_hands(client, server):
    """Lets two channels talk until neither has anything to say."""
    while (left := client.handshake_bytes()) or (right := server.handshake_bytes()):
        if left:
            server.receive(left)
        elif right:
            client.receive(right)


def open_pair(body_limit=1 << 20):
    client, server = Channel(TOKEN, "client", body_limit), Channel(TOKEN, "server", body_limit)
    shake_hands(client, server)
    assert client.is_open and server.is_open
    return client, server


def frame(channel, number=0, body=b""):
    """The bytes that carry a numbered message."""
    return b"".join(channel.send(Message({"kind": "test", "number": number}, body)))


def fill(path: str, stack: contextlib.ExitStack) -> None:
    """Connects to a Unix socket until its queue is full."""
    with contextlib.suppress(BlockingIOError):
        while True:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.setblocking(False)
            sock.connect(path)


class Serving:
    """A server in a thread: where it is, whom it refused, and what reached its handler."""

    def __init__(self):
        self.refused, self.seen, self.loop_errors = queue.Queue(), queue.Queue(), []
        self.address = self.server = self.loop = None

    def refusal(self):
        """The next sentence about a peer that was refused."""
        return self.refused.get(timeout=60)[1]


async def echo(connection):
    """Sends back whatever comes."""
    while True:
        await connection.send(await connection.recv())


@contextlib.contextmanager
def serving(on_connection=echo, address="127.0.0.1:0", token=TOKEN, **options):
    """Runs a server until the block ends, whose errors end the test."""
    world, started = Serving(), threading.Event()

    async def noting(connection):
        world.seen.put(connection.peer)
        await on_connection(connection)

    async def main():
        world.loop, world.stop = asyncio.get_running_loop(), asyncio.Event()
        world.loop.set_exception_handler(lambda _, context: world.loop_errors.append(context))
        refuse = lambda peer, sentence: world.refused.put((peer, sentence))  # noqa: E731
        try:
            world.server = await serve(address, token, noting, on_refused=refuse, **options)
            world.address = world.server.address
        finally:
            started.set()
        async with world.server:
            await world.stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    started.wait()
    try:
        yield world
    finally:
        world.loop.call_soon_threadsafe(world.stop.set)
        thread.join()
    assert not world.loop_errors
