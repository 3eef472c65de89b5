"""The server of controller and agents: a bad peer costs a line in the log, and nothing else."""

import asyncio
import contextlib
import logging
import socket
import threading
import time

import pytest

from moc.runtime import async_connections
from moc.runtime.async_connections import RefusalLog, log_refusal, open_connection, serve
from moc.runtime.connections import connect, format_address, resolve
from moc.runtime.protocol import Channel, Message, PeerGoneError
from tests.cases import each_row
from tests.errors import raises
from tests.unit.runtime.peers import OTHER_TOKEN, TOKEN, echo, frame, serving


def dial(address):
    """A bare socket at a server."""
    family, where = resolve(address)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(60)
    sock.connect(where)
    return sock


def closed(sock):
    """Whether the server has closed this connection; what it said before is read."""
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1000):
            pass
    return True


def let_in(sock, token=TOKEN):
    """The client's half of the handshake."""
    channel = Channel(token, "client")
    while not channel.is_open:
        sock.sendall(channel.handshake_bytes())
        channel.receive(sock.recv(channel.bytes_wanted))
    return channel


def works(address):
    """Whether a peer of the job is served."""
    with connect(address, TOKEN, timeout=60) as connection:
        connection.send(Message({"kind": "hello"}))
        return connection.recv(timeout=60).kind == "hello"


@each_row("kind", ["tcp", "unix"])
def test_client_and_server_share_one_event_loop(kind, tmp_path):
    async def main():
        async with await serve("127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/socket", TOKEN, echo) as server:
            connection = await open_connection(server.address, TOKEN)
            for body in (b"", b"x" * (5 << 20)):
                await connection.send(Message({"kind": "data"}, body))
                assert await connection.recv() == Message({"kind": "data"}, body)
            connection.close()

    asyncio.run(main())
    assert not list(tmp_path.iterdir())  # the socket's file is gone


def test_messages_of_concurrent_tasks_arrive_in_order():
    async def main():
        async with await serve("127.0.0.1:0", TOKEN, echo) as server:
            connection = await open_connection(server.address, TOKEN)

            async def send(task):
                for number in range(30):
                    message = Message({"kind": "test", "at": [task, number]}, bytes(number * 3000))
                    connection.post(message) if number % 2 else await connection.send(message)

            sending = asyncio.gather(*(send(task) for task in range(6)))
            arrived = [(await connection.recv()).header["at"] for _ in range(180)]
            await sending
            for task in range(6):
                assert [number for of, number in arrived if of == task] == list(range(30))
            connection.close()

    asyncio.run(main())


def test_body_may_change_after_send():
    async def main():
        begin = asyncio.Event()

        async def late(connection):
            await begin.wait()
            await echo(connection)

        async with await serve("127.0.0.1:0", TOKEN, late) as server:
            connection = await open_connection(server.address, TOKEN)
            body = bytearray(b"a" * (32 << 20))  # far more than fits into the kernel's buffers
            sending = asyncio.create_task(connection.send(Message({"kind": "data"}, body)))
            await asyncio.sleep(0.1)
            assert not sending.done()
            begin.set()
            await sending
            body[:] = b"b" * len(body)
            assert (await connection.recv()).body == b"a" * len(body)
            connection.close()

    asyncio.run(main())


def test_cancelled_receive_loses_no_message():
    async def main():
        async with await serve("127.0.0.1:0", TOKEN, echo) as server:
            connection = await open_connection(server.address, TOKEN)
            for number in range(30):
                connection.post(Message({"kind": "test", "number": number}, bytes(100_000)))
            arrived = []
            while len(arrived) < 30:
                with contextlib.suppress(asyncio.TimeoutError):
                    arrived.append((await asyncio.wait_for(connection.recv(), 0.001)).header["number"])
            assert arrived == list(range(30))
            connection.close()

    asyncio.run(main())


def test_open_connection_error_names_cause():
    async def main():
        async with await serve("127.0.0.1:0", TOKEN, echo, on_refused=lambda *_: None) as server:
            with raises("token-mismatch", server.address):
                await open_connection(server.address, OTHER_TOKEN)
        with raises("peer-unreachable", server.address, "Connection refused"):
            await open_connection(server.address, TOKEN)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            with raises("peer-unreachable", "0.2 s"):
                await open_connection(f"127.0.0.1:{silent.getsockname()[1]}", TOKEN, timeout=0.2)

    asyncio.run(main())


def test_server_binds_only_loopback_by_default():
    async def main():
        with raises("address-exposed", "0.0.0.0:0"):
            await serve("0.0.0.0:0", TOKEN, echo)
        await (await serve("0.0.0.0:0", TOKEN, echo, beyond_loopback=True)).close()

    asyncio.run(main())


@each_row(
    "said, words",
    [
        (b"GET / HTTP/1.1\r\n\r\n", "does not speak the protocol"),
        (b"moc-wire\x00\x09" + bytes(40), "speaks version 9 of the wire protocol and this process version 1"),
        (b"moc-wire\x00\x01" + bytes(40) + bytes(32), "does not know the job's token"),
        (b"moc-w", "closed the connection before it proved"),
    ],
    ids=["http", "version", "proof", "half"],
)
def test_invalid_handshake_is_reported_in_one_line(said, words):
    with serving() as world:
        with dial(world.address) as sock:
            name = format_address(sock.family, sock.getsockname())
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            assert closed(sock)
        peer, sentence = world.refused.get(timeout=60)
        assert peer == name and words in sentence
        assert world.refused.empty() and world.seen.empty()
        assert works(world.address)


def test_slow_handshake_is_refused():
    with serving(handshake_timeout=0.3) as world, dial(world.address) as sock:
        hello = Channel(TOKEN, "client").handshake_bytes()
        with contextlib.suppress(OSError):
            for byte in hello * 1000:
                sock.sendall(bytes([byte]))
                time.sleep(0.05)
                if not world.refused.empty():
                    break
        assert "within 0.3 s" in world.refusal()
        assert closed(sock)
        assert world.seen.empty()


def test_pending_handshakes_do_not_block_authenticated_peer(monkeypatch):
    monkeypatch.setattr(async_connections, "MAX_HANDSHAKES", 5)
    with serving(handshake_timeout=600) as world, contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(dial(world.address)) for _ in range(20)]
        assert works(world.address)
        assert all("made room" in world.refusal() for _ in range(16)) and world.refused.empty()
        assert all(closed(sock) for sock in crowd[:16])
        crowd[-1].sendall(Channel(TOKEN, "client").handshake_bytes())  # those that fit in are still listened to
        assert crowd[-1].recv(8) == b"moc-wire"


def test_violation_after_handshake_is_reported_in_one_line():
    with serving() as world, dial(world.address) as sock:
        channel = let_in(sock)
        stream = frame(channel)
        sock.sendall(stream + stream)
        assert closed(sock)
        assert "replayed" in world.refusal()
        assert works(world.address)
        assert world.refused.empty()


def test_body_over_server_limit_is_refused():
    with serving(body_limit=1000) as world, dial(world.address) as sock:
        channel = let_in(sock)
        channel._peer_body_limit = 1 << 30  # it heeds no limits
        sock.sendall(frame(channel, body=bytes(1001)))
        assert closed(sock)
        refusal = world.refusal()
        assert "1001 bytes" in refusal and "1000" in refusal.replace("1001", "")


def test_half_closed_peer_gets_answer():
    async def all_then_answer(connection):
        count = 0
        with pytest.raises(PeerGoneError, match="closed"):
            while await connection.recv():
                count += 1
        await connection.send(Message({"kind": "counted", "number": count}))

    with serving(all_then_answer) as world, dial(world.address) as sock:
        channel = let_in(sock)
        sock.sendall(b"".join(frame(channel, number, bytes(1000)) for number in range(50)))
        sock.shutdown(socket.SHUT_WR)
        answers = []
        while not answers:
            answers = channel.receive(sock.recv(1000))
        assert answers[0].header == {"kind": "counted", "number": 50}
        assert world.refused.empty()


def test_disconnecting_peer_causes_no_refusal():
    with serving() as world:
        connect(world.address, TOKEN).close()
        with dial(world.address) as sock:
            sock.sendall(frame(let_in(sock))[:-1])
        assert works(world.address)
    assert world.refused.empty()


def test_handler_error_is_reported():
    async def broken(connection):
        raise KeyError("a bug")

    with serving(broken) as world, dial(world.address) as sock:
        let_in(sock)
        assert closed(sock)
        while not world.loop_errors:
            time.sleep(0.01)
        assert isinstance(world.loop_errors.pop()["exception"], KeyError)
        assert world.refused.empty()


def test_closing_server_ends_its_connections():
    world_of = []
    with serving() as world, dial(world.address) as stranger:
        friend = connect(world.address, TOKEN)
        assert works(world.address)
        world_of.append((friend, stranger.dup()))
    friend, stranger = world_of[0]
    with friend, stranger:
        with pytest.raises(PeerGoneError):
            friend.recv()
        stranger.settimeout(60)
        assert closed(stranger)


def test_abort_drops_messages_posted_to_unresponsive_peer():
    deaf = threading.Event()

    async def posting(connection):
        for _ in range(10):
            connection.post(Message({"kind": "abort"}, bytes(4 << 20)))
        connection.abort()
        with pytest.raises(PeerGoneError, match="is closed"):
            connection.post(Message({"kind": "abort"}))
        deaf.set()

    with serving(posting) as world, connect(world.address, TOKEN) as connection:
        deaf.wait(60)
        with pytest.raises(PeerGoneError):
            while True:
                connection.recv()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system gives up at times of its own")
@each_row("silence", [None, 600.0])
def test_peer_dropped_by_kernel_is_lost_not_silent(silence):
    async def main():
        release = asyncio.Event()

        async def deaf(connection):
            await release.wait()

        async with await serve("127.0.0.1:0", TOKEN, deaf) as server:
            connection = await open_connection(server.address, TOKEN)
            own = connection._writer.get_extra_info("socket")
            own.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 100)  # as keep-alive does, without its minutes
            for _ in range(16):
                connection.post(Message({"kind": "data"}, bytes(4 << 20)))
            with raises("peer-unreachable", "timed out"):
                await connection.recv(silence_s=silence)
            release.set()

    asyncio.run(main())


def test_refusal_log_is_rate_limited(caplog):
    log = RefusalLog(limit=3, interval_s=0.2)
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            log(f"peer {number}", "it is a stranger")
        time.sleep(0.3)
        log("another", "it is one, too")
    assert len(caplog.messages) == 5
    assert "997" in caplog.messages[3]


def test_refusal_is_one_log_line(caplog):
    with caplog.at_level(logging.WARNING):
        log_refusal("127.0.0.1:5", "tokenless")
    (message,) = caplog.messages
    assert message.endswith("127.0.0.1:5: tokenless")
