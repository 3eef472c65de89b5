"""The store over which workers find each other: only for those who know the token, one generation at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from moc.runtime.connections import connect
from moc.runtime.generation import _build_gloo, _gloo_devices
from moc.runtime.managed_job import RendezvousClient, ValueTimeoutError
from moc.runtime.protocol import Message, PeerGoneError, WireError
from moc.runtime.rendezvous_store import RendezvousStore
from tests.cases import each_row
from tests.unit.runtime.peers import OTHER_TOKEN, TOKEN, serving

SOON, MINUTE = timedelta(seconds=0.2), timedelta(minutes=1)


@pytest.fixture
def store():
    """A server with a store, whose address tests connect to."""
    kept = RendezvousStore()

    async def serve(connection):
        await kept.serve(connection, (await connection.recv()).header["generation"])

    with serving(serve) as server:
        yield server


def test_value_set_by_one_worker_reaches_others(store):
    first, second = (RendezvousClient(store.address, TOKEN, 0, MINUTE) for _ in range(2))
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(second.get, "late")
        assert not first.check(["late"])
        first.set("late", "text")
        assert waits.result(60) == b"text"
    first.multi_set(["a", "b"], [b"1", b""])
    second.wait(["a", "b"], MINUTE)
    asked = second._connection.send
    first.multi_set(["group/0", "group/1", "other/0"], [b"0", b"1", b"2"])
    assert second.get("group/1") == b"1"
    second._connection.send = lambda message: pytest.fail("it came with the other")
    assert second.get("group/0") == b"0"
    second._connection.send = asked
    assert second.multi_get(["a", "b"]) == [b"1", b""] and second.get("a") == b"1"
    assert [first.add("count", 2), second.add("count", 3), int(first.get("count"))] == [2, 5, 5]
    assert second.delete_key("a") and not second.delete_key("a") and not first.check(["a", "b"])


def test_gloo_connects_through_rendezvous_store(store):
    class Pair:
        ranks, timeout, group_name = [0, 1], MINUTE, "pair"

        def __init__(self, rank):
            self.rank, self.size = lambda: rank, lambda: 2

    def sums(rank):
        client = RendezvousClient(store.address, TOKEN, 3, MINUTE)
        backend = _build_gloo(Pair(rank), PrefixStore("pair", client), _gloo_devices())
        told = torch.tensor([float(rank + 1)])
        backend.allreduce([told], dist.AllreduceOptions()).wait()
        return told.item()

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(sums, range(2))) == [3.0, 3.0]


def test_unauthenticated_client_is_refused(store):
    RendezvousClient(store.address, TOKEN, 0, MINUTE).set("key", b"value")
    with pytest.raises(WireError):
        RendezvousClient(store.address, OTHER_TOKEN, 0, MINUTE)
    host, _, port = store.address.rpartition(":")
    with pytest.raises(RuntimeError):  # torch's own client, which asks without a proof
        dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))


def test_newer_generation_ends_earlier_one(store):
    old = RendezvousClient(store.address, TOKEN, 0, MINUTE)
    old.set("key", b"old")
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(old.get, "never")
        new = RendezvousClient(store.address, TOKEN, 1, MINUTE)
        assert not new.check(["key"])
        with pytest.raises(PeerGoneError):
            waits.result(60)
    with pytest.raises(PeerGoneError):
        RendezvousClient(store.address, TOKEN, 0, MINUTE).check(["key"])


def test_wait_ends_on_timeout_and_on_close(store):
    client = RendezvousClient(store.address, TOKEN, 0, MINUTE)
    client.set("there", "")
    with pytest.raises(ValueTimeoutError, match=r"^never .*0\.2 s"):
        RendezvousClient(store.address, TOKEN, 0, MINUTE).wait(["there", "never"], SOON)
    assert client.check(["there"]) and not client.check(["never"])
    threading.Timer(0.1, client.close).start()
    with pytest.raises(PeerGoneError):
        client.get("never")


@each_row(
    ("message", "why"),
    [
        ({"kind": "set", "keys": [1], "sizes": [0]}, "a key of the store is text"),
        ({"kind": "set", "keys": ["k"], "sizes": [-1]}, "are numbers"),
        ({"kind": "set", "keys": ["k"], "sizes": [5]}, "0 bytes instead of 5"),
        ({"kind": "set", "keys": ["k"], "sizes": []}, "1 values have 0 sizes"),
        ({"kind": "get", "keys": "k", "within": 1}, "are a list"),
        ({"kind": "get", "keys": ["k"], "within": "1"}, "no number"),
        ({"kind": "add", "key": "k", "amount": []}, "no number"),
        ({"kind": "dance"}, "does not know"),
        ({"kind": "check"}, "has no field keys"),
    ],
)
def test_authenticated_peer_that_breaks_protocol_is_refused(store, message, why):
    with connect(store.address, TOKEN) as peer:
        for each in ({"kind": "meets", "generation": 0}, message):
            peer.send(Message(each))
        with pytest.raises(PeerGoneError):
            peer.recv(60)
    assert why in store.refusal()
