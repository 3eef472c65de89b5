"""What this node holds alike comes from its own snapshot, and the copy has the same bits as one that was sent."""

import asyncio
from dataclasses import replace
from pathlib import Path

import torch

from moc.runtime import async_connections
from moc.runtime.replica_server import ReplicaServer
from moc.runtime.replica_transfer import REQUEST_BYTES, CopyRequest, CopyResult, copy_snapshot
from moc.state.operators import Region
from moc.store.manifest import REPLICAS_KEY, Manifest, OperatorEntry
from moc.store.shard_file import BoxTensor, write_shard_file
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name, shard_file_name
from tests.cases import each_row
from tests.unit.runtime.peers import TOKEN

ITERATION = 7
SHARED = "decoder.final_layernorm.weight"  # of the operator "output"
EXPERTS = [f"decoder.layers.0.mlp.experts.experts.{number}.linear_fc1.weight" for number in range(3)]
LARGE = REQUEST_BYTES // 4 + 3  # elements, of more than one chunk


def store(root: Path) -> Store:
    return Store(LocalStorage(root, in_memory=True), allows_slack=True)


def save(root: Path, names: list[str], alike: dict[str, list[str]], cut: int, **changed: float) -> Manifest:
    """A node's part of a snapshot: each tensor in two boxes, in files of two ranks, which are cut at some row."""
    files, operators = {}, {}
    for rank, (start, stop) in enumerate(((0, cut), (cut, LARGE))):
        tensors = []
        for number, name in enumerate(names):
            which = 1000 * (EXPERTS.index(name) if number else 9)
            values = torch.arange(LARGE, dtype=torch.float32)[start:stop] + which
            values[-1] += changed.get(name.rpartition("experts.")[2][:1], 0.0)
            tensors.append(BoxTensor(name, "master", (LARGE,), Region((start,), (stop - start,)), values))
        path = root / checkpoint_name(ITERATION) / shard_file_name(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        files[path.name] = write_shard_file(path, tensors)
    for name in names:
        operator = f"layers.0.expert.{EXPERTS.index(name)}" if name in EXPERTS else "output"
        operators[operator] = OperatorEntry("full", 3, {"master": LARGE})
    store(root).publish(Manifest(ITERATION, "full", 4, files, operators, state={REPLICAS_KEY: alike} if alike else {}))
    return store(root).read_manifest(ITERATION)


def copied(a: Path, b: Path, operators: dict[str, str] | None = None) -> CopyResult:
    """What node b pulls of node a's part, which it must then have as it is."""

    async def both() -> CopyResult:
        server = ReplicaServer(TOKEN)
        server._roots["a"] = a
        async with await async_connections.serve("127.0.0.1:0", TOKEN, server.serve_reads) as served:
            wanted = CopyRequest(ITERATION, "a", "a", served.address, operators=operators)
            return await copy_snapshot(wanted, TOKEN, b / "of_a", own_directory=b)

    return asyncio.run(both())


ALL = {"2": ["output", *(f"layers.0.expert.{number}" for number in range(3))]}


def content(root: Path) -> dict[str, bytes]:
    manifest, directory = store(root).read_manifest(ITERATION), root / checkpoint_name(ITERATION)
    return {name: (directory / name).read_bytes()[: entry.bytes] for name, entry in manifest.files.items()}


def headers(manifest: Manifest) -> int:
    return sum(entry.header_bytes for entry in manifest.files.values())


def test_only_operators_missing_locally_are_sent(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    theirs = save(a, [SHARED, *EXPERTS[:2]], ALL, cut=100)
    save(b, [SHARED, EXPERTS[0], EXPERTS[2]], ALL, cut=100)
    told = copied(a, b)
    assert told == CopyResult(headers(theirs) + 4 * LARGE, 2 * 4 * LARGE, [], [])  # expert 1 is sent
    assert content(b / "of_a") == content(a)


def test_subset_of_operators_reuses_local_replicas(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    theirs = save(a, [SHARED, *EXPERTS], ALL, cut=100)
    save(b, [SHARED, EXPERTS[2]], ALL, cut=100)
    wanted = {"layers.0.expert.1": "full", "layers.0.expert.2": "full"}
    assert copied(a, b, wanted) == CopyResult(headers(theirs) + 4 * LARGE, 4 * LARGE, [], [])
    there = store(b / "of_a").read_manifest(ITERATION)
    assert there.operators == {name: theirs.operators[name] for name in wanted}
    for name, entry in there.files.items():
        store(b / "of_a").open_verified(ITERATION, name, entry)
    assert copied(a, b, wanted)[:2] == (0, 0)  # it is here


@each_row("harm", ["no part", "other launch", "other boxes", "nothing alike"])
def test_everything_is_sent_without_identical_replicas(harm, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    theirs = save(a, [SHARED, *EXPERTS], {} if harm == "nothing alike" else ALL, cut=100)
    if harm != "no part":
        mine = save(b, [SHARED, *EXPERTS], ALL, cut=200 if harm == "other boxes" else 100)
        if harm == "other launch":
            store(b).publish_as_is(replace(mine, job="another"))
    assert copied(a, b) == CopyResult(theirs.nbytes, 0, [], [])
    assert content(b / "of_a") == content(a)


def test_diverged_replicas_are_named_and_sent(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    theirs = save(a, [SHARED, *EXPERTS], ALL, cut=100)
    save(b, [SHARED, *EXPERTS], ALL, cut=100, **{"1": 1.0})
    assert copied(a, b) == CopyResult(headers(theirs) + 4 * LARGE, 3 * 4 * LARGE, ["layers.0.expert.1"], [])
    assert content(b / "of_a") == content(a)


def test_damaged_local_replica_is_named_and_sent(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    theirs = save(a, [SHARED, *EXPERTS], ALL, cut=100)
    save(b, [SHARED, *EXPERTS], ALL, cut=100)
    path = b / checkpoint_name(ITERATION) / shard_file_name(1)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # the last box, of the last expert
    (amount, alike, differs, (damaged,)) = copied(a, b)
    assert (amount, alike) == (headers(theirs) + 4 * (LARGE - 100), theirs.nbytes - amount) and not differs
    assert damaged == "layers.0.expert.2"
    assert content(b / "of_a") == content(a)
