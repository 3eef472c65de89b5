"""The order in which neighbours in a ring connect."""

import concurrent.futures
import graphlib
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from moc.runtime.abort import open_sockets
from moc.runtime.generation import Generation, cut_unauthenticated_connections, neighbours
from tests.cases import each_row


@each_row("size", range(3, 18))
def test_ring_neighbours_connect_without_deadlock(size):
    before = {}  # by pair, the pairs that must be connected first
    for rank in range(size):
        peers = neighbours(rank, size)
        assert sorted(peers) == sorted({(rank - 1) % size, (rank + 1) % size})
        first, second = (frozenset((rank, peer)) for peer in peers)
        before.setdefault(second, set()).add(first)
    sorter = graphlib.TopologicalSorter(before)
    sorter.prepare()  # raises CycleError
    rounds = 0
    while sorter.is_active():
        sorter.done(*sorter.get_ready())
        rounds += 1
    assert rounds <= 3


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


def test_unauthenticated_connections_are_closed(connected):
    listener, (with_second, with_stranger), (second, stranger) = connected
    store, barrier = HashStore(), threading.Barrier(2)
    first = [inode(sock) for sock in (listener, with_second, with_stranger)]
    with ThreadPoolExecutor() as pool:
        known = pool.map(
            lambda mine: cut_unauthenticated_connections(store, "key", mine, barrier.wait), (first, [inode(second)])
        )
    assert list(known) == [1, 1]
    stranger.settimeout(60)
    assert stranger.recv(1) == b""
    second.sendall(b"x")
    assert with_second.recv(1) == b"x"
    with socket.socket() as late, pytest.raises(TimeoutError):
        late.settimeout(0.3)
        late.connect(listener.getsockname())


def test_ranks_wait_over_a_constant_number_of_values():
    """With a value of each rank, which all ranks read, the store's work would grow with the square of the ranks."""
    store, ranks = HashStore(), list(range(8))
    generations = [Generation(3, lambda: store, torch.device("cpu")) for _ in ranks]
    with ThreadPoolExecutor(len(ranks)) as pool:
        wait = lambda generation: generation._wait_for_ranks("all", ranks, timedelta(minutes=1))  # noqa: E731
        early = [pool.submit(wait, generation) for generation in generations[1:]]
        assert not concurrent.futures.wait(early, timeout=0.2).done
        wait(generations[0])
        assert [future.result() for future in early] == [None] * len(early)
    assert store.num_keys() == 2
