"""Damage is found and named, whatever it is; a run goes on from the next older snapshot, or not at all."""

import random
import shutil
from pathlib import Path

import pytest

from moc.store.manifest import MANIFEST_FILE as MANIFEST
from moc.store.shard_file import ShardReader
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name, shard_file_name
from tests.errors import only_code
from tests.integration.snapshot_files import EVERY, damage, events, node_memory, start, stores, train, whole
from tests.integration.test_atomic_save import wait_for
from tests.integration.tiny import Trained, known


@pytest.fixture(scope="module")
def snapshot(data, tmp_path_factory) -> Path:
    """The directory of a snapshot by two workers."""
    flags = data | EVERY | dict(ckpt_dir=str(tmp_path_factory.mktemp("published")), train_iters=1)
    train("EP2", flags)
    return Path(flags["ckpt_dir"], checkpoint_name(1))


@pytest.fixture
def published(snapshot, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(snapshot, tmp_path / snapshot.name)
    return tmp_path / snapshot.name


def said_of(snapshot: Path) -> str:
    """What is wrong with a snapshot."""
    said = damage(Store(LocalStorage(snapshot.parent)), 1)
    assert said is not None
    return said


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Turns a bit over; again, and it is as before."""
    with open(path, "r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("rank", [0, 1])
def test_flipped_bit_is_found_and_named(rank, published):
    file = published / shard_file_name(rank)
    begin, size = int.from_bytes(file.read_bytes()[:8], "little") + 8, file.stat().st_size
    for position in (0, 7, 8, begin // 2, begin - 1):
        flip(file, position)
        assert str(file) in said_of(published)
        flip(file, position)
    for position in (begin, (begin + size) // 2, size - 1, *random.Random(rank).sample(range(begin, size), 20)):
        (hit,) = (s.box for s in ShardReader([file]).sources() if s.start <= position < s.start + s.box.nbytes)
        flip(file, position, position % 8)
        said = said_of(published)
        assert str(file) in said and f"{hit.slot} of {hit.name} at {hit.region.offset}" in said
        flip(file, position, position % 8)
    assert damage(Store(LocalStorage(published.parent)), 1) is None


def test_flipped_bit_of_manifest_is_always_detected(published):
    store, path = Store(LocalStorage(published.parent)), published / MANIFEST
    whole = store.read_manifest(1)
    for position in (0, *random.Random(1).sample(range(path.stat().st_size), 300), path.stat().st_size - 1):
        flip(path, position, position % 8)
        assert str(path) in (damage(store, 1) or str(path)) and (damage(store, 1) or store.read_manifest(1) == whole)
        flip(path, position, position % 8)


@pytest.mark.parametrize("name", [MANIFEST, shard_file_name(0), shard_file_name(1)])
def test_truncated_longer_or_missing_file_is_named(name, published):
    file = published / name
    content = file.read_bytes()
    for length in {len(content) - 1, len(content) // 2, min(4096, len(content) - 2), 8, 1, 0}:
        file.write_bytes(content[:length])
        assert str(file) in said_of(published)
    file.write_bytes(content + content[:1])
    assert str(file) in said_of(published)
    file.unlink()
    assert str(file) in said_of(published)


@pytest.fixture
def flags(data, tmp_path):
    """Of a run that takes a snapshot in each iteration."""
    with node_memory() as memory:
        places = dict(ckpt_dir=str(tmp_path / "snapshots"), ckpt_memory_dir=memory, log_dir=str(tmp_path / "log"))
        yield data | EVERY | places | dict(ckpt_keep=9)


def middle(path: Path) -> None:
    """Damages a file's data."""
    flip(path, path.stat().st_size * 3 // 4)


DAMAGES = {
    "data": (shard_file_name(1), middle),
    "header": (shard_file_name(0), lambda path: flip(path, 100)),
    "manifest": (MANIFEST, middle),
    "missing": (shard_file_name(1), Path.unlink),
    "empty": (shard_file_name(1), lambda path: path.write_bytes(b"")),
}


@pytest.mark.parametrize(("layout", "kind"), [*(("plain DP2", kind) for kind in DAMAGES), ("EP2", "data")])
def test_damaged_snapshot_is_skipped(layout, kind, data, flags):
    name, spoil = DAMAGES[kind]
    train(layout, flags | dict(exit_interval=4))
    spoilt = Path(flags["ckpt_dir"], checkpoint_name(4), name)
    spoil(spoilt)
    world = start(layout, flags)
    results = world.wait()
    assert [result.exit for result in results] == [0, 0], results[0].output
    (warning,) = (line for line in results[0].output.splitlines() if "WARNING" in line and str(spoilt) in line)
    assert only_code(warning) in ("checkpoint-damaged", "checkpoint-unreadable")
    rest, straight = results[0].value, known(layout, data)
    assert rest["start"] == events(flags, "resume")[-1]["iteration"] == 3
    assert rest["records"] == straight.records[3:]
    assert {box: straight.weights[box] for box in rest["weights"]} == rest["weights"]
    assert whole(flags)["storage"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.recovery
@pytest.mark.parametrize("name", [shard_file_name(0), MANIFEST])
def test_damaged_memory_falls_back_to_storage(name, data, flags):
    flags = flags | dict(ckpt_tier="memory", persist_interval=2, train_iters=1000)
    world = start("plain DP2", flags)
    wait_for(lambda: world.ended() or (stores(flags)["storage"].iterations() and iteration_in_memory(flags) > 2))
    world.kill()
    assert {result.exit for result in world.wait()} == {-9}
    memory, stored = stores(flags)["memory"], stores(flags)["storage"].iterations()[-1]
    for iteration in memory.iterations():
        spoil = Path(memory.storage.display_path(checkpoint_name(iteration)), name)
        middle(spoil)
    stop = dict(train_iters=1000, exit_interval=stored + 5)
    world, straight = start("plain DP2", flags | stop), train("plain DP2", data | stop)
    results = world.wait()
    rest = Trained([result.value for result in results])
    assert any("WARNING" in line and str(spoil) in line for line in results[0].output.splitlines())
    assert rest.start == stored and events(flags, "resume")[-1]["tier"] == "storage"
    assert rest.records == straight.records[stored:]
    assert rest.weights == straight.weights


def iteration_in_memory(flags: dict) -> int:
    """Of the newest snapshot there."""
    return max(stores(flags)["memory"].iterations(), default=0)


def test_run_does_not_start_without_valid_snapshot(flags):
    train("plain DP2", flags | dict(exit_interval=2))
    for iteration in (1, 2):
        middle(Path(flags["ckpt_dir"], checkpoint_name(iteration), shard_file_name(iteration - 1)))
    for result in start("plain DP2", flags).wait():
        assert result.exit == 1, result.output
        (said,) = (line for line in result.output.splitlines() if "plain.py: error" in line)
        assert (
            only_code(said) == "no-complete-snapshot" and str(Path(checkpoint_name(2), shard_file_name(1))) in said
        ), said
        assert "Traceback" not in result.output
    assert len(events(flags, "start")) == 1  # nothing was trained
    assert stores(flags)["storage"].iterations() == [1, 2]


@pytest.mark.parametrize("older", ["none", "older"])
def test_dense_checkpoint_replaces_damaged_snapshots(older, data, flags, tmp_path):
    dense = dict(save=str(tmp_path / "dense"), load=str(tmp_path / "dense"))
    train("EP2", data | dense | dict(exit_interval=1))
    train("EP2", flags | dict(dense, save=None, exit_interval=3))
    for iteration in (2, 3) if older == "none" else (3,):
        middle(Path(flags["ckpt_dir"], checkpoint_name(iteration), shard_file_name(1)))
    rest, straight = train("EP2", flags | dict(dense, save=None)), known("EP2", data)
    assert rest.start == (1 if older == "none" else 2)
    assert rest.records == straight.records[rest.start :]
