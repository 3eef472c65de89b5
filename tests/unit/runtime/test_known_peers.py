"""Who is connected with gloo is known to the job, or cut."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from moc.runtime.abort import open_sockets
from moc.runtime.generation import meet


def inode(sock):
    """What ``open_sockets`` says of a socket."""
    found = os.fstat(sock.fileno()).st_ino
    assert found in open_sockets()
    return found


@pytest.fixture
def connected():
    """A listener of the first worker, its connections with the second one and with a stranger, and their far ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        near = [listener.accept()[0] for _ in far]
        yield listener, near, far
        for sock in near + far:
            sock.close()


def test_connections_of_strangers_are_cut_and_no_more_are_taken(connected):
    listener, (with_second, with_stranger), (second, stranger) = connected
    store, barrier = HashStore(), threading.Barrier(2)
    first = [inode(sock) for sock in (listener, with_second, with_stranger)]
    with ThreadPoolExecutor() as pool:
        known = pool.map(lambda mine: meet(store, "key", mine, barrier.wait), (first, [inode(second)]))
    assert list(known) == [1, 1]
    stranger.settimeout(60)
    assert stranger.recv(1) == b""
    second.sendall(b"x")
    assert with_second.recv(1) == b"x"
    with socket.socket() as late, pytest.raises(TimeoutError):
        late.settimeout(0.3)
        late.connect(listener.getsockname())
