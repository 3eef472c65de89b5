"""Connections of threads with a server: over TCP and Unix sockets, with many senders, and with peers that misbehave."""

import asyncio
import contextlib
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from moc.errors import cause_of
from moc.runtime.async_connections import open_connection as open_in_loop
from moc.runtime.connections import connect, format_address, listening_socket, retry_connect, short_socket_address
from moc.runtime.protocol import Channel, Message, PeerGoneError, WireError
from tests.cases import each_row
from tests.errors import raises
from tests.unit.runtime.peers import OTHER_TOKEN, TOKEN, fill, frame, serving


@pytest.fixture(params=["tcp", "unix"])
def address(request, tmp_path):
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/socket"


@contextlib.contextmanager
def peer_of_one(body):
    """A server for one connection, which knows the token and does with the socket as it likes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run():
            sock, _ = listener.accept()
            with sock:
                body(sock)

        with ThreadPoolExecutor() as threads:
            running = threads.submit(run)
            yield format_address(listener.family, listener.getsockname())
            running.result()


def let_in(sock):
    """The server's half of the handshake."""
    channel = Channel(TOKEN, "server")
    while not channel.is_open:
        sock.sendall(channel.handshake_bytes())
        channel.receive(sock.recv(channel.bytes_wanted))
    sock.sendall(channel.handshake_bytes())
    return channel


def test_messages_of_all_sizes_round_trip(address):
    with serving(address=address) as world, connect(world.address, TOKEN) as connection:
        assert connection.peer == world.address
        for size in (0, 1, 70_000, 5 << 20):
            sent = Message({"kind": "data", "size": size}, bytes(range(256)) * (size // 256) + bytes(size % 256))
            connection.send(sent)
            assert connection.recv() == sent


def test_messages_of_concurrent_threads_arrive_in_order(address):
    threads, each = 8, 50
    with serving(address=address) as world, connect(world.address, TOKEN) as connection:

        def run(thread):
            for number in range(each):
                connection.send(Message({"kind": "test", "at": [thread, number]}, bytes([thread]) * (number * 1000)))

        senders = [threading.Thread(target=run, args=(thread,)) for thread in range(threads)]
        for sender in senders:
            sender.start()
        arrived = [connection.recv(timeout=60) for _ in range(threads * each)]
        for sender in senders:
            sender.join()
    for thread in range(threads):
        of_thread = [message for message in arrived if message.header["at"][0] == thread]
        assert [message.header["at"][1] for message in of_thread] == list(range(each))
        assert all(bytes(m.body) == bytes([thread]) * (m.header["at"][1] * 1000) for m in of_thread)


def test_wrong_token_is_reported_at_both_ends(address):
    with serving(address=address) as world:
        with raises("token-mismatch", world.address):
            connect(world.address, OTHER_TOKEN)
        assert "token" in world.refusal()
        assert world.seen.empty()
        connect(world.address, TOKEN).close()


def test_connecting_without_server_is_an_error(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = format_address(free.family, free.getsockname())
    with raises("peer-unreachable", address, "Connection refused"):
        connect(address, TOKEN)
    with raises("peer-unreachable", "No such file"):
        connect(f"unix:{tmp_path}/none", TOKEN)
    with raises("address-invalid"):
        connect("nowhere", TOKEN)


@each_row("long", [False, True], ids=["short path", "long path"])
def test_connect_waits_while_accept_queue_is_full(tmp_path, long):
    directory = tmp_path / ("x" * 100) if long else tmp_path
    directory.mkdir(exist_ok=True)
    address = f"unix:{directory}/socket"
    listener = listening_socket(address, beyond_loopback=False)
    with contextlib.ExitStack() as stack, short_socket_address(f"{directory}/socket") as path:
        listener.listen(0)
        fill(path, stack)
        with raises("peer-unreachable", "0.2 s"):
            connect(address, TOKEN, timeout=0.2)
        with raises("peer-unreachable", "0.2 s"):
            asyncio.run(open_in_loop(address, TOKEN, timeout=0.2))
        with ThreadPoolExecutor() as threads:
            ways = [threads.submit(connect, address, TOKEN, timeout=60), threads.submit(echoed, address)]
            time.sleep(0.2)
            assert not any(way.done() for way in ways)
            with serving(address=address, listener=listener):
                ways[0].result().close()
                assert ways[1].result() == "test"


def echoed(address):
    """What a server sends back over a connection of an event loop."""

    async def main():
        connection = await open_in_loop(address, TOKEN, timeout=60)
        await connection.send(Message({"kind": "test"}))
        answer = await connection.recv()
        connection.close()
        return answer.kind

    return asyncio.run(main())


def test_host_refuses_only_if_all_its_addresses_do(tmp_path, monkeypatch):
    """Otherwise an agent would count its controller as dead."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refusing, absent = (socket.AF_INET, closed.getsockname()), (socket.AF_UNIX, f"{tmp_path}/none")
        for other, cause in (refusing, ConnectionRefusedError), (absent, FileNotFoundError):
            for name in ("connections", "async_connections"):
                monkeypatch.setattr(f"moc.runtime.{name}.resolve", lambda _, other=other: [other, refusing])
            with pytest.raises(PeerGoneError) as blocking:
                connect("host:1", TOKEN)
            with pytest.raises(PeerGoneError) as waiting:
                asyncio.run(open_in_loop("host:1", TOKEN))
            assert type(blocking.value.__cause__) is type(waiting.value.__cause__) is cause


def test_silent_address_of_host_leaves_time_for_others(monkeypatch):
    """As an IPv6 address whose packets a firewall drops."""
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(2):  # its queue is full
            peer = stack.enter_context(socket.socket())
            peer.setblocking(False)
            peer.connect_ex(silent.getsockname())
        world = stack.enter_context(serving())
        host, port = world.address.split(":")
        addresses = [(socket.AF_INET, silent.getsockname()), (socket.AF_INET, (host, int(port)))]
        for name in ("connections", "async_connections"):
            monkeypatch.setattr(f"moc.runtime.{name}.resolve", lambda _: addresses)
        connect("host:1", TOKEN, timeout=2.0).close()
        asyncio.run(open_in_loop("host:1", TOKEN, timeout=2.0))


def test_failed_connect_is_retried_within_limits(tmp_path):
    attempts = []

    def attempt(fails):
        attempts.append(None)
        if len(attempts) <= fails:
            return connect(f"unix:{tmp_path}/none", TOKEN)
        return "connected"

    assert retry_connect(lambda: attempt(3)) == "connected" and len(attempts) == 4
    for limit in (dict(timeout_s=0.0), dict(except_cause=FileNotFoundError)):
        attempts.clear()
        with pytest.raises(PeerGoneError):
            retry_connect(lambda: attempt(1000), **limit)
        assert len(attempts) == 1
    with serving() as world, pytest.raises(WireError, match="token"):
        retry_connect(lambda: connect(world.address, OTHER_TOKEN))


def test_silent_server_times_out():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts for it, as for a stopped process
        with raises("peer-unreachable", "0.2 s"):
            connect(format_address(silent.family, silent.getsockname()), TOKEN, timeout=0.2)


def test_trickling_server_times_out():
    def trickle(sock):
        with contextlib.suppress(OSError):
            for byte in Channel(TOKEN, "server").handshake_bytes() * 1000:
                sock.sendall(bytes([byte]))
                if gone.wait(0.05):
                    return

    gone = threading.Event()
    with peer_of_one(trickle) as address:
        with raises("peer-unreachable", "0.3 s"):
            connect(address, TOKEN, timeout=0.3)
        gone.set()


def test_other_service_at_address_is_refused():
    with peer_of_one(lambda sock: sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")) as address:
        with raises("peer-foreign", address):
            connect(address, TOKEN)


def test_receive_timeout_loses_no_data():
    going = threading.Event()

    def slowly(sock):
        stream = frame(let_in(sock), 7, b"x" * 100)
        sock.sendall(stream[:50])
        going.wait(60)
        sock.sendall(stream[50:])

    with peer_of_one(slowly) as address, connect(address, TOKEN) as connection:
        for _ in range(2):
            with pytest.raises(TimeoutError, match="no message has arrived"):
                connection.recv(timeout=0.05)
        going.set()
        assert connection.recv(timeout=60).header["number"] == 7
        with pytest.raises(PeerGoneError, match="127.0.0.1:.* closed"):
            connection.recv()


def test_altered_message_ends_connection():
    def wrong(sock):
        stream = bytearray(frame(let_in(sock), 0, b"body"))
        stream[-40] ^= 1
        sock.sendall(stream)
        assert sock.recv(100) == b""  # it was closed

    with peer_of_one(wrong) as address, connect(address, TOKEN) as connection:
        with pytest.raises(WireError, match=f"message 0 from {address} was changed"):
            connection.recv()
        for again in (connection.recv, lambda: connection.send(Message({"kind": "test"}))):
            with pytest.raises(WireError):
                again()


def test_last_message_is_received_after_failed_send():
    def last_words(sock):
        sock.sendall(frame(let_in(sock), 1))
        sock.sendall(b"")

    with peer_of_one(last_words) as address, connect(address, TOKEN) as connection:
        with pytest.raises(PeerGoneError, match="has broken"):
            while True:
                connection.send(Message({"kind": "test"}))
        assert connection.recv().header["number"] == 1


def test_close_wakes_receiving_thread():
    with serving() as world:
        connection, errors = connect(world.address, TOKEN), []

        def wait(timeout):
            with pytest.raises(PeerGoneError) as caught:
                while True:
                    connection.recv(timeout)
            errors.append(cause_of(caught.value))

        waiting = threading.Thread(target=wait, args=(None,))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        connection.close()
        waiting.join()
        wait(10)
        assert connection.fileno() == -1
        connection.close()  # once more does no harm
    assert len(set(errors)) == 1 and "this process" in errors[0] and str(world.address) in errors[0]


def test_close_wakes_thread_sending_to_unresponsive_peer():
    done = threading.Event()

    def deaf(sock):
        let_in(sock)
        done.wait(60)

    with peer_of_one(deaf) as address:
        connection, errors = connect(address, TOKEN), []

        def send():
            with pytest.raises(PeerGoneError) as caught:
                connection.send(Message({"kind": "test"}, bytes(64 << 20)))
            errors.append(caught.value)

        sending = threading.Thread(target=send)
        sending.start()
        sending.join(0.3)
        assert sending.is_alive()
        connection.close()
        sending.join()
        done.set()
    assert errors


def test_reset_connection_raises_peer_gone():
    def reset(sock):
        let_in(sock)
        sock.recv(10)  # so the handshake is over at the other end too
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with peer_of_one(reset) as address, connect(address, TOKEN) as connection:
        connection.send(Message({"kind": "test"}))
        with raises("peer-unreachable", "Connection reset"):
            connection.recv()
