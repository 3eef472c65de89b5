"""Whatever is in a manifest or in the header of a file, reading it ends in a value as expected or in a known error."""

import json
import os
import random

import pytest

from moc.inspect.checkpoint import read_all_boxes, read_checkpoint
from moc.store import dense_files, header
from moc.store.errors import CheckpointError
from moc.store.header import INDEX_KEY, read_boxes
from moc.store.manifest import FORMAT, FileEntry, Manifest, OperatorEntry, RankReport
from moc.store.ownership import Claim, Fence, Holder
from moc.store.storage import LocalStorage
from moc.store.store import Store, find_run
from tests.cases import each_row
from tests.errors import raises
from tests.mutations import changed, signed

ROUNDS = 10_000 if os.environ.get("MOC_TESTS_ALL") == "1" else 2_000


def manifest():
    entry = FileEntry(100, 50, "0" * 32)
    operators = {"layers.0.mlp": OperatorEntry("full", 3, {"master": 4, "exp_avg": 4})}
    state = {"shape": {"num_layers": 1}, "consumed_samples": 4}
    return Manifest(3, "full", 1, {"rank_00000.safetensors": entry}, operators, {"dp": 1}, state, "run", "job", (1, 2))


def test_crafted_manifests_are_read_or_refused(tmp_path):
    rng, plain, read = random.Random(0), json.loads(manifest().to_json()), 0
    for _ in range(ROUNDS):
        crafted = changed(rng, plain)
        if rng.random() < 0.3:
            crafted = changed(rng, crafted)
        try:
            got = Manifest.from_json(signed(crafted) if isinstance(crafted, dict) else json.dumps(crafted), "it")
        except CheckpointError as error:
            assert str(error).isprintable() and len(str(error)) < 500
            continue
        read += 1
        assert got.nbytes >= 0 and got.iteration >= 0
        assert all(os.path.basename(name) == name and name.isprintable() for name in got.files)
        json.dumps(got.to_json())
    assert 0 < read < ROUNDS / 2


def test_crafted_reports_are_read_or_refused():
    rng, plain = (
        random.Random(1),
        json.loads(RankReport("rank_00000.safetensors", FileEntry(9, 9, "0" * 32), {}).to_json()),
    )
    for _ in range(2000):
        try:
            RankReport.from_json(json.dumps(changed(rng, plain)))
        except (KeyError, TypeError, ValueError):
            pass


def test_crafted_headers_are_read_or_refused():
    rng, data = random.Random(2), bytes(64)
    index = {"0": ["w", "master", [4, 4], [0, 0], "0" * 32], "1": ["b", "master", [8], [4], "1" * 32]}
    described = {"0": dict(dtype="F32", shape=[2, 4], data_offsets=[0, 32]),
                 "1": dict(dtype="F32", shape=[4], data_offsets=[32, 48])}  # fmt: skip
    read = 0
    for _ in range(ROUNDS):
        crafted_index, crafted = (changed(rng, one) if rng.random() < 0.6 else one for one in (index, described))
        text = json.dumps({"__metadata__": {INDEX_KEY: json.dumps(crafted_index)}, **crafted}).encode()
        if rng.random() < 0.1:
            text = text[: rng.randrange(len(text))]
        file = len(text).to_bytes(8, "little") + text + data
        try:
            header = read_boxes("file", len(file), lambda start, stop, file=file: file[start:stop])
        except ValueError as error:
            assert str(error).isprintable() and len(str(error)) < 500
            continue
        read += 1
        for box in header:
            assert 0 <= box.start <= box.start + box.nbytes <= len(file)
            assert min(*box.region.offset, *box.region.shape, *box.global_shape, 0) == 0
    assert 0 < read < ROUNDS / 2


DEEP = "[" * 100_000


@each_row("deep", [DEEP, '{"a":' * 100_000, f'{{"format": "{FORMAT}", "state": {"[" * 990}{"]" * 990}}}'])
def test_too_deeply_nested_json_is_refused(tmp_path, deep):
    with raises("checkpoint-damaged"):
        Manifest.from_json(deep, "it")
    for name in ("iter_0000003/manifest.json", ".run.json", ".fence"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(deep)
    with pytest.raises(CheckpointError):
        dense_files.read_manifest(tmp_path / "iter_0000003")
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "iter_0000003")
    assert find_run(LocalStorage(tmp_path)) is None
    assert Fence(tmp_path, Claim("job")).read() is None
    with pytest.raises((KeyError, ValueError), match="nested|job"):  # Python 3.12 reads 990 levels
        Holder.from_json(deep)
    header = deep.encode()
    with pytest.raises(ValueError, match="nested|`object`"):
        whole = len(header).to_bytes(8, "little") + header
        read_boxes("file", len(whole), lambda start, stop: whole[start:stop])


@each_row("name", ["../../outside", "/outside", "a/../../b", "..", "a/b", ".hidden", "a\nb", ""])
def test_no_file_name_leads_out_of_checkpoint(tmp_path, name):
    store, target = Store(LocalStorage(tmp_path / "a" / "b")), Store(LocalStorage(tmp_path / "c" / "d"))
    plain = json.loads(manifest().to_json())
    plain["files"] = {name: plain["files"].popitem()[1]}
    store.storage.write("iter_0000003/manifest.json", [signed(plain).encode()])
    with raises("checkpoint-damaged", "manifest.json"):
        store.read_manifest(3)
    with pytest.raises(CheckpointError):
        read_checkpoint(tmp_path / "a" / "b" / "iter_0000003")
    if ".." in name.split("/") or name.startswith("/"):
        for leads_out in (
            target.storage.read,
            target.storage.open_blob,
            target.storage.remove,
            target.storage.list_names,
        ):
            with pytest.raises(ValueError, match="outside"):
                leads_out(name)
        with pytest.raises(ValueError, match="outside"):
            target.storage.write(name, [b""])
    assert not list(tmp_path.glob("outside*"))


def test_older_checkpoint_replaces_unreadable_one(tmp_path):
    from moc.recovery.inventory import list_checkpoints

    store = Store(LocalStorage(tmp_path))
    for iteration, text in ((3, manifest().to_json()), (4, DEEP), (5, signed({"format": FORMAT, "files": 3}))):
        store.storage.write(f"iter_{iteration:07d}/manifest.json", [text.encode()])
    found = list_checkpoints(store)
    assert [one.iteration for one in found[0]] in ([3], [])  # what it describes may be missing
    assert len(found[1]) >= 2


def test_crafted_checkpoint_regions_are_read_or_reported(tmp_path):
    directory = tmp_path / "iter_0000003"
    store = Store(LocalStorage(tmp_path))
    store.storage.write("iter_0000003/manifest.json", [manifest().to_json().encode()])
    (directory / "rank_00000.safetensors").write_bytes(b"\xff" * 100)
    checkpoint = read_checkpoint(directory)
    assert checkpoint.shard_files and read_all_boxes(checkpoint)[0] == []


@each_row(
    ("spans", "told"), [([[0, 8], [12, 16]], "byte 8 .* no box"), ([[0, 8], [4, 16]], "byte 4 .* more than one box")]
)
def test_unclaimed_or_overlapping_data_is_reported(spans, told):
    with pytest.raises(ValueError, match=told):
        header.check_spans(
            [header.StoredTensor("U8", (1,), (start, stop)) for start, stop in spans], 16, allows_slack=False
        )
