"""What keeps copies of other nodes' snapshots: whole or not there, and nothing else of a node can be read."""

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from moc.recovery.inventory import summary
from moc.runtime import environment, protocol, replica_transfer
from moc.runtime import replica_server as replica_server_module
from moc.runtime.connections import connect
from moc.runtime.protocol import Message, WireError
from moc.runtime.replica_server import ReplicaClient, ReplicaServer
from moc.runtime.replica_transfer import REQUEST_BYTES, CopyRequest
from moc.state.operators import Region
from moc.store.errors import CheckpointError
from moc.store.manifest import MANIFEST_FILE, FileEntry, Manifest, OperatorEntry, compute_digest
from moc.store.shard_file import BoxTensor, ShardReader, write_shard_file
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name, is_shard_file, shard_file_name
from tests.slow_way import SlowWay
from tests.unit.runtime.peers import OTHER_TOKEN, TOKEN, serving

ROOT = Path(__file__).parents[3]
HEADER = 64
SIZES = 3000, 100, HEADER
LARGE = 2 * REQUEST_BYTES + 5, REQUEST_BYTES, 100


class Keeping:
    """A replica server in a process of its own."""

    def __init__(self, directory: Path, listen: str = "127.0.0.1:0"):
        self.orders = f"unix:{directory}/orders"
        command = [sys.executable, "-m", "moc.runtime.replica_server", "--listen", listen, "--orders", self.orders]
        self.process = subprocess.Popen(command, cwd=ROOT, env=with_token(), stdout=subprocess.PIPE, text=True)
        self.address = self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def with_token():
    return os.environ | {protocol.TOKEN_VARIABLE: TOKEN.hex()}


@pytest.fixture(scope="module")
def replica_servers(tmp_path_factory):
    """Of two nodes."""
    both = [Keeping(tmp_path_factory.mktemp("replica_server")) for _ in range(2)]
    yield both
    for replica_server in both:
        replica_server.end()


@pytest.fixture
def lead(monkeypatch, tmp_path):
    """Offers the memory of a node as its leading worker does, in a directory of its name."""
    monkeypatch.setenv(protocol.TOKEN_VARIABLE, TOKEN.hex())
    clients = []

    def offer(replica_server: Keeping, node: str) -> ReplicaClient:
        monkeypatch.setenv(environment.REPLICA_SERVER, replica_server.orders)
        clients.append(ReplicaClient.connect(node, tmp_path / node))
        assert clients[-1].address == replica_server.address
        return clients[-1]

    yield offer
    for client in clients:
        client.close()


def snapshots(root: Path) -> Store:
    return Store(LocalStorage(root, in_memory=True), allows_slack=True)


def publish(root: Path, iteration: int, sizes: tuple[int, ...] = SIZES, state: dict | None = None) -> Manifest:
    """A node's part of a snapshot, with other bytes in each iteration."""
    files = {}
    for rank, size in enumerate(sizes):
        data = random.Random(iteration * 10 + rank).randbytes(size)
        path = root / checkpoint_name(iteration) / shard_file_name(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data + b"slack")
        files[shard_file_name(rank)] = FileEntry(size, HEADER, compute_digest(data[:HEADER]))
    manifest = Manifest(iteration, "full", len(sizes), files, {}, state=state or {})
    snapshots(root).publish(manifest)
    return manifest


def content(root: Path, manifest: Manifest) -> dict[str, bytes]:
    """What is published of a snapshot."""
    assert snapshots(root).read_manifest(manifest.iteration) == manifest
    directory = root / checkpoint_name(manifest.iteration)
    return {name: (directory / name).read_bytes()[: entry.bytes] for name, entry in manifest.files.items()}


def of_a(replica_servers, iteration, **how) -> CopyRequest:
    return CopyRequest(iteration, "a", "a", replica_servers[0].address, **how)


def test_copy_equals_committed_snapshot(replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    b = lead(replica_servers[1], "b")
    manifest = publish(tmp_path / "a", 3, LARGE, {"much": "x" * (REQUEST_BYTES + 7)})
    assert b.copy(of_a(replica_servers, 3))[0].bytes == manifest.nbytes == sum(LARGE)
    assert content(tmp_path / "b" / "of_a", manifest) == content(tmp_path / "a", manifest)
    assert b.copy(of_a(replica_servers, 3))[0].bytes == 0  # it is here
    assert not snapshots(tmp_path / "b").iterations()


def test_manifest_replaced_during_copy_is_read_consistently(replica_servers, lead, tmp_path):
    """A node replaces its manifest when it carries or folds experts; its size changes."""
    lead(replica_servers[0], "a")
    b = lead(replica_servers[1], "b")
    short = publish(tmp_path / "a", 3)
    versions = [replace(short, state={"much": "x" * size}).to_json().encode() for size in (1, 50_000)]
    path, ended = tmp_path / "a" / checkpoint_name(3) / MANIFEST_FILE, threading.Event()

    def exchange() -> None:
        for text in itertools.cycle(versions):
            path.with_name("new").write_bytes(text)
            path.with_name("new").replace(path)
            if ended.is_set():
                return

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        for _ in range(100):
            b.copy(of_a(replica_servers, 3))
    finally:
        ended.set()
        thread.join()
    copied = snapshots(tmp_path / "b" / "of_a").read_manifest(3)
    assert copied.to_json().encode() in versions


def test_lost_node_restores_its_snapshot_from_copy(replica_servers, lead, tmp_path):
    manifest = publish(tmp_path / "a", 3)
    lead(replica_servers[0], "a")
    lead(replica_servers[1], "b").copy(of_a(replica_servers, 3))
    before = content(tmp_path / "a", manifest)
    snapshots(tmp_path / "a").remove_all()
    lead(replica_servers[0], "a").copy(CopyRequest(3, "a", "b", replica_servers[1].address))
    assert content(tmp_path / "a", manifest) == before


def test_copies_use_bounded_number_of_buffers(replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    b, copies = lead(replica_servers[1], "b"), tmp_path / "b" / "of_a"
    for iteration in range(1, 7):
        publish(tmp_path / "a", iteration)
        b.copy(of_a(replica_servers, iteration))
        if iteration > 2:
            snapshots(copies).remove(iteration - 2)
    slots = {path.stat().st_ino for path in (copies / "slots").iterdir()}
    named = {path.stat().st_ino for path in copies.glob("iter_*/rank_*")}
    assert len(slots) == 3 * len(SIZES) and named < slots and len(named) == 2 * len(SIZES)


def test_patient_request_waits_for_later_commit(replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    b = lead(replica_servers[1], "b")
    with pytest.raises(CheckpointError, match="node a .*iteration 3"):
        b.copy(of_a(replica_servers, 3))
    (tmp_path / "a").mkdir(exist_ok=True)
    orders = b._connection
    orders.send(Message({"kind": "pull", "wanted": vars(of_a(replica_servers, 3, patient=True))}))
    with pytest.raises(TimeoutError):
        orders.recv(timeout=0.1)
    manifest = publish(tmp_path / "a", 3)
    assert orders.recv().header["bytes"] == manifest.nbytes


def assert_nothing_is_published(copies: Path) -> None:
    assert not snapshots(copies).iterations()


@pytest.mark.parametrize("truncated", [True, False], ids=["truncated", "damaged"])
def test_damaged_or_truncated_file_is_named(truncated, replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    publish(tmp_path / "a", 3)
    path = tmp_path / "a" / checkpoint_name(3) / shard_file_name(1)
    path.write_bytes(path.read_bytes()[:99] if truncated else b"?" + path.read_bytes()[1:])
    with pytest.raises(CheckpointError, match=f"{shard_file_name(1)} .*iteration 3 .*node a.*(truncated|hash|match)"):
        lead(replica_servers[1], "b").copy(of_a(replica_servers, 3, patient=True))
    assert_nothing_is_published(tmp_path / "b" / "of_a")


def test_missing_space_error_names_remedy(replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    manifest = publish(tmp_path / "a", 3)
    files = {shard_file_name(0): FileEntry(1 << 62, HEADER, "0" * 32)}
    snapshots(tmp_path / "a").publish(Manifest(3, "full", 1, files, {}, state=manifest.state))
    with pytest.raises(CheckpointError, match="no room.*--replicas"):
        lead(replica_servers[1], "b").copy(of_a(replica_servers, 3, patient=True))
    assert_nothing_is_published(tmp_path / "b" / "of_a")


def test_killed_peer_leaves_no_copy_and_request_is_retried(replica_servers, lead, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    replica_server = Keeping(tmp_path / "x")
    lead(replica_server, "a")
    manifest = publish(tmp_path / "a", 3, LARGE)
    b, copies = lead(replica_servers[1], "b"), tmp_path / "b" / "of_a"
    for patient, rate in ((False, 1e6), (True, 5e6)):  # so slow that it is killed midway on a busy machine too
        wanted = CopyRequest(3, "a", "a", replica_server.address, rate=rate, patient=patient)
        b._connection.send(Message({"kind": "pull", "wanted": vars(wanted)}))
        while not list(copies.glob("slots/*")):
            time.sleep(0.01)
        replica_server.end()
        assert_nothing_is_published(copies)
        if not patient:
            assert b._connection.recv().kind == "failed"
            assert_nothing_is_published(copies)
        replica_server = Keeping(tmp_path / "y", replica_server.address)
        lead(replica_server, "a")
    assert b._connection.recv().header["bytes"] == manifest.nbytes
    assert content(copies, manifest) == content(tmp_path / "a", manifest)
    replica_server.end()


def test_reconnecting_node_cancels_its_copy_in_progress(replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    publish(tmp_path / "a", 3, LARGE)
    b, copies = lead(replica_servers[1], "b"), tmp_path / "b" / "of_a"
    b._connection.send(Message({"kind": "pull", "wanted": vars(of_a(replica_servers, 3, rate=1e4))}))
    while not list(copies.glob("slots/*")):
        time.sleep(0.01)
    b = lead(replica_servers[1], "b")  # the one before may have been killed, and its end not been noticed
    publish(tmp_path / "a", 4)
    b.copy(of_a(replica_servers, 4))
    assert snapshots(copies).iterations() == [4]


def test_copy_rate_limit_is_respected(replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    publish(tmp_path / "a", 3, LARGE)
    (amount, *_), seconds = lead(replica_servers[1], "b").copy(of_a(replica_servers, 3, rate=50e6))
    assert seconds >= 0.95 * amount / 50e6


def test_slow_sender_does_not_time_out(replica_servers, lead, tmp_path, monkeypatch):
    monkeypatch.setattr(replica_transfer, "SILENCE_TIMEOUT_S", 2.0)
    lead(replica_servers[0], "a")
    manifest = publish(tmp_path / "a", 3, (240_000,))
    way = SlowWay(replica_servers[0].address, rate=60_000)  # one answer takes twice as long as nothing at all may come
    wanted = CopyRequest(3, "a", "a", way.address)
    assert asyncio.run(replica_transfer.copy_snapshot(wanted, TOKEN, tmp_path / "b" / "of_a")).bytes == manifest.nbytes
    assert content(tmp_path / "b" / "of_a", manifest) == content(tmp_path / "a", manifest)


def test_stalled_sender_is_named_and_copy_completes_later(replica_servers, lead, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(replica_transfer, "SILENCE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(replica_server_module, "_WARN_AFTER_S", 0.0)
    lead(replica_servers[0], "a")
    manifest = publish(tmp_path / "a", 3, LARGE)
    way = SlowWay(replica_servers[0].address, stalls_after=REQUEST_BYTES)
    with serving(ReplicaServer(TOKEN, "x").serve_orders, f"unix:{tmp_path}/orders") as b:
        client = ReplicaClient(connect(b.address, TOKEN), "b", tmp_path / "b")
        client._connection.send(
            Message({"kind": "pull", "wanted": vars(CopyRequest(3, "a", "a", way.address, None, True))})
        )
        while "node b waits for the snapshot of node a: node a has sent nothing" not in caplog.text:
            time.sleep(0.01)
        assert_nothing_is_published(tmp_path / "b" / "of_a")
        way.flows.set()
        assert client._connection.recv(timeout=60).header["bytes"] == manifest.nbytes
        client.close()
    assert content(tmp_path / "b" / "of_a", manifest) == content(tmp_path / "a", manifest)


def ask(replica_server, **what):
    with connect(replica_server.address, TOKEN) as connection:
        connection.send(Message({"kind": "read", "start": 0, "bytes": 100} | what))
        return connection.recv(timeout=60)


ASKED = {"node": "a", "of": "a", "iteration": 3, "file": "rank_00000.safetensors"}


@pytest.mark.parametrize(
    "what",
    [
        {"file": "../secret"},
        {"file": "rank_00000.safetensors/../../secret"},
        {"file": "/etc/hostname"},
        {"file": ".lock"},
        {"file": "rank_00007.safetensors"},  # a link to a secret
        {"file": None},
        {"of": "../a"},
        {"of": ""},
        {"iteration": "../../a"},
        {"iteration": -1},
        {"iteration": True},
        {"start": -1},
        {"bytes": -5},
        {"bytes": "all"},
    ],
    ids=str,
)
def test_only_snapshot_files_are_readable(what, replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    publish(tmp_path / "a", 3)
    for path in (tmp_path / "secret", tmp_path / "a" / "secret"):
        path.write_text("secret")
    (tmp_path / "a" / checkpoint_name(3) / shard_file_name(7)).symlink_to(tmp_path / "secret")
    assert ask(replica_servers[0], **ASKED).kind == "data"
    answer = ask(replica_servers[0], **ASKED | what)
    assert answer.kind == "refused" and not answer.body


def test_state_not_offered_is_reported_absent(replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    publish(tmp_path / "a", 3)
    for what in ({"node": "c"}, {"node": ["a"]}, {"of": "b"}, {"iteration": 4}, {"file": "rank_00009.safetensors"}):
        assert ask(replica_servers[0], **ASKED | what).kind == "absent"


def test_unauthenticated_peer_reads_and_orders_nothing(replica_servers):
    for address in (replica_servers[0].address, replica_servers[0].orders):
        with pytest.raises(WireError, match="token"):
            connect(address, OTHER_TOKEN)


def test_server_restarts_at_its_port_and_dies_with_agent(tmp_path):
    run = f"run_replica_server(['127.0.0.1:1'], 'unix:{tmp_path}/o', {TOKEN}, timeout_s=1.0)"
    code = f"import asyncio; from moc.runtime.replica_server import run_replica_server; asyncio.run({run})"
    agent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=with_token())
    killed, addresses = [], []
    for number in (signal.SIGKILL, signal.SIGSTOP, None):
        while not (there := [p for p in psutil.Process(agent.pid).children() if listens(p) and p not in killed]):
            time.sleep(0.01)
        killed += there
        addresses.append(listens(there[0]))
        there[0].send_signal(number) if number else agent.kill()
    assert addresses[0] == addresses[1] == addresses[2]
    psutil.wait_procs(killed)
    agent.wait()


def listens(process: psutil.Process) -> list:
    try:
        return [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


EXPERTS = {f"layers.0.expert.{e}": f"decoder.layers.0.mlp.experts.experts.{e}.linear_fc1.weight" for e in range(4)}
TENSORS = EXPERTS | {"output": "output_layer.weight"}
ROWS = 6


def save(root: Path, iteration: int = 3) -> Manifest:
    """As a node with two writers, each of which has rows of every operator."""
    files, elements = {}, {"master": ROWS * 2, "exp_avg": ROWS * 2}
    for rank, rows in enumerate((2, 4)):
        where = Region((2 * rank, 0), (rows, 2))
        values = {(name, slot): torch.rand(rows, 2) for name in TENSORS.values() for slot in elements}
        path = root / checkpoint_name(iteration) / shard_file_name(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = [BoxTensor(name, slot, (ROWS, 2), where, data) for (name, slot), data in values.items()]
        files[path.name] = write_shard_file(path, tensors)
    operators = {name: OperatorEntry("full", iteration, elements) for name in TENSORS}
    snapshots(root).publish(Manifest(iteration, "selective", 4, files, operators, state={"ledger": {"iteration": 7}}))
    return snapshots(root).read_manifest(iteration)


def values(root: Path, iteration: int = 3) -> dict[tuple[str, str], list]:
    """All that is there, every hash compared."""
    store = snapshots(root)
    manifest = store.read_manifest(iteration)
    reader = ShardReader(
        [store.open_verified(iteration, name, entry) for name, entry in manifest.files.items()], verifies=True
    )
    sources = list(reader.sources())
    assert len({(s.box.name, s.box.slot, s.box.region) for s in sources}) == len(sources)  # each once
    there = {(s.box.name, s.box.slot) for s in sources}
    return {key: reader.read_region(*key, Region((0, 0), (ROWS, 2))).tolist() for key in there}


def some_of_a(replica_servers, **details) -> CopyRequest:
    named = {f"layers.0.{name[:6]}.{name[6:]}" if name.startswith("expert") else name: d for name, d in details.items()}
    return of_a(replica_servers, 3, operators=named)


def test_partial_copy_sends_each_byte_once(replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    b, copies = lead(replica_servers[1], "b"), tmp_path / "b" / "of_a"
    whole, before = save(tmp_path / "a"), values(tmp_path / "a")
    slot_bytes, headers = ROWS * 2 * 4, sum(entry.header_bytes for entry in whole.files.values())

    def wants(number: int, **details) -> dict:
        """Pulls, and says what is there then."""
        pulled, _ = b.copy(some_of_a(replica_servers, **details))
        assert pulled.bytes == number * slot_bytes + (headers if number else 0)
        return snapshots(copies).read_manifest(3).operators

    assert wants(4, output="full", expert2="full").keys() == {"output", "layers.0.expert.2"}
    assert values(copies) == {
        key: v for key, v in before.items() if key[0] in (TENSORS["output"], EXPERTS["layers.0.expert.2"])
    }
    assert wants(0, expert2="full").keys() == {"output", "layers.0.expert.2"}  # it is here
    moments = wants(1, output="full", expert1="moments")["layers.0.expert.1"]
    assert moments == OperatorEntry("moments", 3, {"exp_avg": ROWS * 2})
    assert (EXPERTS["layers.0.expert.1"], "master") not in values(copies)
    wants(4, expert0="full", expert3="full", elsewhere="full")
    there = values(copies)
    assert there == {key: before[key] for key in there} and len(there) == len(before) - 1
    manifest = snapshots(copies).read_manifest(3)
    assert replace(manifest, files={}, operators={}) == replace(whole, files={}, operators={})
    assert summary(manifest).files == 0 and not any(
        map(is_shard_file, manifest.files)
    )  # these are not all that ranks saved


def test_copy_of_all_operators_equals_full_copy(replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    manifest = save(tmp_path / "a")
    amount = lead(replica_servers[1], "b").copy(some_of_a(replica_servers, **dict.fromkeys(TENSORS, "full")))[0].bytes
    amount_again = lead(replica_servers[1], "c").copy(of_a(replica_servers, 3))[0].bytes
    assert amount == amount_again == manifest.nbytes
    assert content(tmp_path / "b" / "of_a", manifest) == content(tmp_path / "c" / "of_a", manifest)


def test_lost_node_restores_some_operators_from_copy(replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    save(tmp_path / "a")
    lead(replica_servers[1], "b").copy(some_of_a(replica_servers, expert1="full"))
    snapshots(tmp_path / "a").remove_all()
    lead(replica_servers[0], "a").copy(CopyRequest(3, "a", "b", replica_servers[1].address))
    assert values(tmp_path / "a") == values(tmp_path / "b" / "of_a") and len(values(tmp_path / "a")) == 2


def test_retaken_snapshot_keeps_nothing_of_former_one(replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    b, copies = lead(replica_servers[1], "b"), tmp_path / "b" / "of_a"
    save(tmp_path / "a")
    b.copy(some_of_a(replica_servers, expert1="full"))
    manifest = save(tmp_path / "a")
    snapshots(tmp_path / "a").publish(replace(manifest, state={"ledger": {"iteration": 8}}))
    b.copy(some_of_a(replica_servers, expert2="full"))
    there = values(copies)
    assert there == {key: v for key, v in values(tmp_path / "a").items() if key[0] == EXPERTS["layers.0.expert.2"]}


def test_file_with_damaged_header_is_not_copied(replica_servers, lead, tmp_path):
    lead(replica_servers[0], "a")
    save(tmp_path / "a")
    path = tmp_path / "a" / checkpoint_name(3) / shard_file_name(1)
    path.write_bytes(path.read_bytes().replace(b"experts.1.", b"experts.2."))
    with pytest.raises(CheckpointError, match=f"{shard_file_name(1)} .*iteration 3 .*node a.*hash"):
        lead(replica_servers[1], "b").copy(some_of_a(replica_servers, expert2="full"))
    assert_nothing_is_published(tmp_path / "b" / "of_a")
