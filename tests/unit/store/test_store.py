"""A checkpoint is whole or not there, whenever the process that writes or removes it is killed."""

import errno
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from moc.state.operators import Region
from moc.store.manifest import FileEntry, Manifest, OperatorEntry, RankReport
from moc.store.ownership import Claim
from moc.store.shard_file import BoxTensor, FileLayout, ShardReader, compute_digest, tensor_bytes
from moc.store.storage import LocalStorage
from moc.store.store import Store, checkpoint_name, shard_file_name
from tests.errors import raises
from tests.unit.store.kills import kills

WORLD = 2


def tensor_of(iteration, rank):
    """Other values in each iteration, and sizes too."""
    rows = 1 + iteration % 7
    values = torch.full((rows, 4), float(iteration * 10 + rank))
    return BoxTensor("output_layer.weight", "master", (WORLD * rows, 4), Region((rank * rows, 0), (rows, 4)), values)


def file_parts(iteration, rank):
    """A rank's file, in pieces, and its word on it."""
    tensor = tensor_of(iteration, rank)
    layout, data = FileLayout([tensor.box]), tensor_bytes(tensor.values)
    header = layout.header([compute_digest(data)])
    operators = {"output": OperatorEntry("full", iteration, {"master": tensor.values.numel()})}
    return [header, data], RankReport(
        shard_file_name(rank), FileEntry(layout.nbytes, len(header), compute_digest(header)), operators
    )


def slowly(parts):
    for part in parts:
        sys.audit("a.part")
        yield part
    sys.audit("a.part")


def written(store, iteration):
    """All ranks write and say so."""
    for rank in range(WORLD):
        parts, part = file_parts(iteration, rank)
        store.write_file(iteration, rank, slowly(parts))
        store.store_report(iteration, rank, part)


def publish(store, iteration):
    parts = store.read_reports(iteration, range(WORLD))
    operators = {"output": OperatorEntry("full", iteration, {"master": 4 * WORLD * (1 + iteration % 7)})}
    store.publish(Manifest(iteration, "full", WORLD, {part.name: part.file for part in parts}, operators))


def saved(store, *iterations):
    for iteration in iterations:
        written(store, iteration)
        publish(store, iteration)


def assert_whole(store, iteration):
    manifest = store.read_manifest(iteration)
    assert sorted(manifest.files) == [shard_file_name(rank) for rank in range(WORLD)]
    reader = ShardReader([store.open_verified(iteration, *file) for file in manifest.files.items()], verifies=True)
    for rank in range(WORLD):
        tensor = tensor_of(iteration, rank)
        assert torch.equal(reader.read_region(tensor.name, tensor.slot, tensor.region), tensor.values)


def files(store):
    return sorted(str(path.relative_to(store.storage.root)) for path in store.storage.root.rglob("*") if path.is_file())


def files_of(*iterations):
    return sorted(
        f"{checkpoint_name(i)}/{name}"
        for i in iterations
        for name in ["manifest.json", shard_file_name(0), shard_file_name(1)]
    )


@pytest.fixture
def store():
    """With two checkpoints; in memory where there is a file system for it, since kills are many."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        store = Store(LocalStorage(Path(directory) / "checkpoints", in_memory=True))
        saved(store, 10, 20)
        yield store


def left_by_kills(store, action):
    """A store for each way to be killed in ``action``, which begins with the same files each time."""
    root = store.storage.root
    pristine = root.with_name("pristine")
    shutil.copytree(root, pristine)

    def again():
        shutil.rmtree(root, ignore_errors=True)  # the action may have removed it
        shutil.copytree(pristine, root)

    for _ in kills(functools.partial(action, store), root):
        for iteration in store.iterations():
            assert_whole(store, iteration)
        yield
        again()
    for iteration in store.iterations():
        assert_whole(store, iteration)


def test_checkpoint_is_visible_after_commit(store):
    written(store, 30)
    assert store.iterations() == [10, 20]
    with raises("checkpoint-unreadable", "iter_0000030/manifest.json"):
        store.read_manifest(30)
    publish(store, 30)
    assert store.iterations() == [10, 20, 30]
    assert_whole(store, 30)
    assert files(store) == files_of(10, 20, 30)  # nothing but what the format names


def test_published_checkpoint_does_not_depend_on_removals(store):
    written(store, 30)
    store.storage.root.joinpath(checkpoint_name(30), *["level"] * 40).mkdir(parents=True)
    publish(store, 30)
    assert_whole(store, 30)


def test_one_checkpoint_that_stays_does_not_keep_others(store):
    saved(store, 30, 40)
    for iteration in (10, 50, 60):
        (store.storage.root / checkpoint_name(iteration)).mkdir(exist_ok=True)
    for iteration in (10, 50):
        (store.storage.root / checkpoint_name(iteration) / "manifest.json.removed" / "x").mkdir(parents=True)
    with pytest.raises(OSError):
        store.remove_unpublished()
    assert store.storage.list_names() == [checkpoint_name(iteration) for iteration in (10, 20, 30, 40, 50)]


def test_many_reports_are_listed_and_removed_together(store, monkeypatch):
    listed, synced, fsync = [], [], os.fsync

    class Names(list):
        def __iter__(self):
            listed.append(len(self))
            return super().__iter__()

    list_names = LocalStorage.list_names
    for rank in range(40):
        parts, part = file_parts(30, rank)
        store.write_file(30, rank, parts)
        store.store_report(30, rank, part)
    monkeypatch.setattr(LocalStorage, "list_names", lambda self, path="": Names(list_names(self, path)))
    reports = store.read_reports(30, range(40))
    assert [part.name for part in reports] == [shard_file_name(rank) for rank in range(40)] and len(listed) <= 2
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), fsync(file)))
    store.publish(Manifest(30, "full", 40, {part.name: part.file for part in reports}, {}))
    assert len(synced) < 10
    assert not [name for name in list_names(store.storage, checkpoint_name(30)) if name.startswith(".")]


@pytest.mark.slow
def test_save_killed_anywhere_keeps_valid_checkpoint(store):
    def action(store):
        saved(store, 30)
        store.remove(10)

    seen = set()
    for _ in left_by_kills(store, action):
        assert 20 in store.iterations()
        seen.add(tuple(store.iterations()))
        store.remove_unpublished()
        saved(store, 30)  # the next job does it again
        store.remove(10)
        assert_whole(store, 30)
        assert files(store) == files_of(20, 30)
    assert seen == {(10, 20), (10, 20, 30), (20, 30)}


def test_removal_killed_anywhere_leaves_complete_or_none(store):
    store.write_file(10, 0, file_parts(10, 0)[0])  # so that no order of names has the manifest first by chance
    seen = set()
    for _ in left_by_kills(store, lambda store: store.remove(10)):
        seen.add(tuple(store.iterations()))
        store.remove_unpublished()
        assert files(store) in (files_of(20), files_of(10, 20))
    assert seen == {(10, 20), (20,)}
    assert files(store) == files_of(20)


def test_retake_of_hidden_checkpoint_survives_kill_anywhere(store):
    def action(store):
        store.hide(20)
        store.remove_unpublished()
        saved(store, 20)

    seen = set()
    for _ in left_by_kills(store, action):
        seen.add(tuple(store.iterations()))
        store.remove_unpublished()
        assert f"{checkpoint_name(20)}/{shard_file_name(0)}" in files(
            store
        )  # never thrown away before it is written anew
        saved(store, 20)
        assert files(store) == files_of(10, 20)
    assert seen == {(10,), (10, 20)}


def test_removal_of_all_can_be_repeated_after_kill(store):
    for _ in left_by_kills(store, lambda store: store.remove_all()):
        store.remove_all()
        assert files(store) == []


def test_sweep_killed_anywhere_keeps_committed_checkpoints(store):
    written(store, 30)
    written(store, 5)
    for _ in left_by_kills(store, lambda store: store.remove_unpublished()):
        assert store.iterations() == [10, 20]
        store.remove_unpublished()
        assert files(store) == files_of(10, 20)


def test_copy_to_other_storage_survives_kill_anywhere(store, tmp_path):
    target, manifest = Store(LocalStorage(tmp_path / "target")), store.read_manifest(20)

    def action():
        store.copy_files(manifest, target)
        target.publish(manifest)

    for _ in kills(action, target.storage.root):
        assert target.iterations() in ([], [20])
        for iteration in target.iterations():
            assert_whole(target, iteration)
        shutil.rmtree(target.storage.root, ignore_errors=True)
    assert_whole(target, 20)
    assert files(target) == files_of(20)


def test_hidden_checkpoint_is_kept_and_not_listed(store):
    store.hide(20)
    assert store.iterations() == [10]
    store.remove_unpublished()
    assert shard_file_name(0) in store.storage.list_names(checkpoint_name(20))
    with raises("checkpoint-removed", checkpoint_name(20)):
        store.read_manifest(20)


def test_message_of_ended_process_is_not_attributed_to_next(store):
    """A rank writes over what was set aside, and all are killed; in the next life another rank does."""
    store.hide(20)
    for rank in range(WORLD):
        parts, part = file_parts(20, rank)
        store.write_file(20, rank, parts)
        store.store_report(20, rank, part)
        store.remove_unpublished()
        assert not store.is_publishable(20, range(WORLD))
        assert shard_file_name(0) in store.storage.list_names(checkpoint_name(20))
    with raises("report-unreadable", ".rank_00000.json"):
        publish(store, 20)
    saved(store, 20)
    assert store.iterations() == [10, 20]
    assert files(store) == files_of(10, 20)


def test_remove_all_leaves_nothing(store):
    (store.storage.root / ".lock").touch()
    (store.storage.root / "slots").mkdir()
    (store.storage.root / "slots" / "rank_00000.0").touch()
    store.remove_all()
    assert not store.storage.root.exists()
    store.remove_all()


def test_superseded_owner_cannot_remove_all(store):
    old, new = (Store(LocalStorage(store.storage.root, claim=Claim("job", (0, term), "run"))) for term in (0, 1))
    old.take()
    new.take()
    with raises("directory-taken-over", "generation 0.0"):
        old.remove_all()
    assert new.iterations() == [10, 20]


def test_other_directories_are_kept(store):
    for name in ("iter_12", "iter_0000010.old", "xiter_0000010", "notes"):
        (store.storage.root / name).mkdir()
    assert store.iterations() == [10, 20]
    store.remove_unpublished()
    store.remove(10)
    assert {"iter_12", "iter_0000010.old", "xiter_0000010", "notes"} < set(store.storage.list_names())


def test_every_header_byte_and_file_size_are_verified(store):
    name, entry = shard_file_name(0), store.read_manifest(20).files[shard_file_name(0)]
    path = store.storage.root / checkpoint_name(20) / name
    whole = path.read_bytes()
    assert store.find_header_damage(20, name, entry) is None
    for position in (*range(0, entry.header_bytes, 97), entry.header_bytes - 1):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert str(path) in store.find_header_damage(20, name, entry)
        with raises("checkpoint-damaged", str(path)):
            store.open_verified(20, name, entry)
    for other in (whole[:-1], whole + b"\0", b""):
        path.write_bytes(other)
        with raises("checkpoint-damaged", str(len(other)), str(entry.bytes)):
            store.open_verified(20, name, entry)
    path.unlink()
    with raises("checkpoint-unreadable", str(path), os.strerror(errno.ENOENT)):
        store.open_verified(20, name, entry)
