"""Checkpoints in object storage, on a real S3 server of this machine."""

import functools
import gc
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest
import torch

from moc.files.safe_directory import RefusedFileError
from moc.state.operators import Region
from moc.store import object_storage
from moc.store.manifest import MANIFEST_FILE as MANIFEST
from moc.store.manifest import FileEntry, Manifest, OperatorEntry
from moc.store.object_storage import ObjectStorage
from moc.store.ownership import Claim
from moc.store.shard_file import BoxTensor, DamagedTensorError, FileLayout, ShardReader, compute_digest, tensor_bytes
from moc.store.store import Store, shard_file_name
from tests.cases import each_row
from tests.errors import raises
from tests.s3_server import s3_server

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed; see the extra [s3]")
pytest.importorskip("moto.server", reason="moto and flask are not installed; see the extra [dev]")

ROOT = Path(__file__).parents[3]
PART = 5 << 20  # the least that S3 takes


@pytest.fixture(scope="module")
def server():
    with s3_server() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield
    s3fs.S3FileSystem.clear_instance_cache()
    other_client.cache_clear()


@pytest.fixture
def bucket(server):
    name = f"bucket-{uuid.uuid4().hex}"
    other_client().mkdir(name)
    return name


@pytest.fixture
def elsewhere(bucket, monkeypatch):
    """For a test that changes where connections lead to: none is kept from before, or for later."""
    s3fs.S3FileSystem.clear_instance_cache()
    yield monkeypatch
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def place(bucket):
    return ObjectStorage(f"s3://{bucket}/run", part_bytes=PART)


@pytest.fixture(params=["s3", "memory"])
def any_place(request):
    if request.param == "s3":
        return request.getfixturevalue("place")
    return ObjectStorage(f"memory://{uuid.uuid4().hex}/run")


@functools.cache
def other_client():
    """Somebody else, who keeps nothing that the place's own connection keeps."""
    return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)


def uploads(bucket):
    """Uploads that were begun and neither completed nor given up."""
    return other_client().call_s3("list_multipart_uploads", Bucket=bucket).get("Uploads", [])


def tensors(rank):
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
    region = Region((3 * rank, 0), (3, 5))
    half = values.to(torch.bfloat16)
    return [
        BoxTensor("w", "master", (6, 5), region, values),
        BoxTensor("w", "param", (6, 5), region, half),
    ]


def save(store, iteration, ranks=2):
    """Writes a checkpoint, and publishes it."""
    files = {}
    for rank in range(ranks):
        layout = FileLayout(tensor.box for tensor in tensors(rank))
        values = [tensor_bytes(tensor.values) for tensor in tensors(rank)]
        header = layout.header([compute_digest(value) for value in values])
        store.write_file(iteration, rank, [header, *values])
        files[shard_file_name(rank)] = FileEntry(layout.nbytes, layout.header_bytes, compute_digest(header))
    operators = {"w": OperatorEntry("full", iteration, {"master": 15 * ranks, "param": 15 * ranks})}
    store.publish(Manifest(iteration=iteration, policy="full", writers=ranks, files=files, operators=operators))


def read(store, iteration):
    return ShardReader(
        (store.storage.open_blob(f"iter_{iteration:07d}/{name}") for name in store.read_manifest(iteration).files),
        verifies=True,
    )


def test_written_objects_are_read_listed_and_removed(any_place):
    assert any_place.list_names() == []
    any_place.write("iter_1/b", [b"12", memoryview(b"345"), bytearray(b"")])
    any_place.write("iter_1/a", [])
    any_place.write("iter_10/c", [b"6"])
    assert any_place.list_names() == ["iter_1", "iter_10"]
    assert any_place.list_names("iter_1") == ["a", "b"]
    assert any_place.list_names("iter_1/a") == any_place.list_names("iter_2") == []
    assert (any_place.read("iter_1/a"), any_place.read("iter_1/b")) == (b"", b"12345")
    any_place.write("iter_1/b", [b"anew"])
    assert any_place.read("iter_1/b") == b"anew"
    any_place.remove("iter_1/a")
    assert any_place.list_names("iter_1") == ["b"]
    any_place.write("iter_1/a", [])
    any_place.write("iter_1/d", [])
    any_place.remove_files("iter_1", ["a", "d", "missing"])
    any_place.remove_files("iter_2", [])
    assert any_place.list_names("iter_1") == ["b"]
    any_place.remove("iter_1")
    any_place.remove("iter_1")
    assert any_place.list_names() == ["iter_10"]
    for missing in (any_place.read, any_place.open_blob):
        with pytest.raises(FileNotFoundError, match=re.escape(f"{any_place.name}/iter_1/b:")):
            missing("iter_1/b")
    with pytest.raises(FileNotFoundError):
        any_place.open_blob("iter_10")
    assert any_place.free_bytes() is None


def test_too_large_object_is_not_fetched(any_place, monkeypatch):
    any_place.write("large", [bytes(1000)])
    any_place.write("empty", [])
    fetched, kind = [], type(any_place._fs)
    original = kind.cat_file
    monkeypatch.setattr(
        kind, "cat_file", lambda self, *args, **how: (fetched.append(args), original(self, *args, **how))[1]
    )
    with pytest.raises(RefusedFileError):
        any_place.read("large", max_bytes=999)
    assert not fetched
    assert any_place.read("large", max_bytes=1000) == bytes(1000) and any_place.read("empty", max_bytes=0) == b""


def test_ranges_are_read_like_slices(any_place, monkeypatch):
    monkeypatch.setattr(
        object_storage, "_CHUNK", 7
    )  # so that a hundred bytes come in several batches of several streams
    data = bytes(range(200)) * 2
    any_place.write("file", [data])
    blob = any_place.open_blob("file")
    assert blob.size == 400
    for start, stop in [(0, 400), (3, 9), (13, 391), (390, 1000), (400, 401), (5, 5)]:
        assert blob.read(start, stop) == data[start:stop]
    view = blob.read(0, 4)
    view[0] = 255
    assert any_place.read("file") == data


def test_large_files_are_uploaded_in_parts(place, bucket):
    data = os.urandom(2 * PART + 1000)
    place.write("file", [data[:10], data[10 : PART + 7], memoryview(data)[PART + 7 :]])
    assert place.read("file") == data
    etag = other_client().info(f"{bucket}/run/file")["ETag"]
    assert etag.strip('"').endswith("-3")  # S3's mark for an object of three parts
    place.write("file", [data[:PART]])
    assert place.read("file") == data[:PART]
    assert uploads(bucket) == []


def test_committed_values_are_restored_bit_identically(any_place):
    store = Store(any_place)
    save(store, 7)
    assert store.iterations() == [7]
    manifest = store.read_manifest(7)
    assert manifest.is_complete
    assert [store.find_header_damage(7, name, entry) for name, entry in manifest.files.items()] == [None, None]
    reader = read(store, 7)
    for slot, dtype in (("master", torch.int32), ("param", torch.int16)):
        whole = torch.cat([t.values for rank in (0, 1) for t in tensors(rank) if t.slot == slot])
        for box in (Region((0, 0), (6, 5)), Region((2, 1), (3, 2)), Region((4, 0), (1, 5))):
            assert torch.equal(
                reader.read_region("w", slot, box).view(dtype), whole[box.slices()].contiguous().view(dtype)
            )


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # from closing what was given up
@pytest.mark.parametrize("seen", [False, True], ids=["first", "again"])
def test_failed_write_keeps_previous_object(place, bucket, seen):
    if seen:
        place.write("file", [b"before"])

    def parts():
        yield bytes(2 * PART)
        assert len(uploads(bucket)) == 1
        raise KeyError("second")

    with pytest.raises(KeyError, match="second"):
        place.write("file", parts())
    gc.collect()
    assert place.list_names() == (["file"] if seen else [])
    assert not seen or place.read("file") == b"before"
    assert uploads(bucket) == []


KILLED = """
import sys, threading
from moc.store.object_storage import ObjectStorage
from moc.store.store import Store
def parts():
    yield bytes(12 << 20)
    print("halfway", flush=True)
    threading.Event().wait()
store = Store(ObjectStorage(sys.argv[1], 5 << 20))
store.write_file(7, 0, [b"whole"])
store.write_file(7, 1, parts())
"""


@pytest.mark.recovery
def test_killed_writer_leaves_no_visible_object(place, bucket):
    store = Store(place)
    save(store, 6)
    with subprocess.Popen([sys.executable, "-c", KILLED, place.name], cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout.readline() == b"halfway\n"
        writer.send_signal(signal.SIGKILL)
    assert len(uploads(bucket)) == 1  # it was in the middle of one
    assert place.list_names("iter_0000007") == ["rank_00000.safetensors"]
    with pytest.raises(FileNotFoundError):
        place.open_blob("iter_0000007/rank_00001.safetensors")
    assert store.iterations() == [6]
    store.remove_unpublished()
    assert place.list_names() == ["iter_0000006"]
    save(store, 7)
    assert store.iterations() == [6, 7]


@pytest.mark.parametrize("offset, named", [(-1, r"param of w at \(0, 0\)"), (100, "its header does not match")])
def test_flipped_bit_is_found_and_named(place, bucket, offset, named):
    store = Store(place)
    save(store, 7)
    path = f"{bucket}/run/iter_0000007/rank_00000.safetensors"
    data = bytearray(other_client().cat_file(path))
    data[offset] ^= 4
    other_client().pipe_file(path, bytes(data))
    if offset < 0:
        with pytest.raises(DamagedTensorError, match=f"s3://{path} is damaged: {named}"):
            read(store, 7).read_region("w", "param", Region((0, 0), (6, 5)))
    else:
        entry = store.read_manifest(7).files["rank_00000.safetensors"]
        assert re.search(
            f"s3://{path} is damaged: {named}", store.find_header_damage(7, "rank_00000.safetensors", entry)
        )


def test_truncated_object_is_named(place, bucket):
    store = Store(place)
    save(store, 7)
    path = f"{bucket}/run/iter_0000007/rank_00000.safetensors"
    blob = place.open_blob("iter_0000007/rank_00000.safetensors")
    other_client().pipe_file(path, other_client().cat_file(path)[:-1])
    with pytest.raises(OSError, match=rf"s3://{path}: .*\b9 .*\b10\b"):
        blob.read(blob.size - 10, blob.size)
    entry = store.read_manifest(7).files["rank_00000.safetensors"]
    assert "truncated" in store.find_header_damage(7, "rank_00000.safetensors", entry)


def test_blob_range_is_cached_until_another_is_read(place):
    place.write("one", [b"12345"])
    place.write("two", [b"67890"])
    one, two = place.open_blob("one"), place.open_blob("two")
    assert one.read(1, 4) == b"234"
    place.remove("one")
    assert one.read(1, 4) == b"234"  # to compare with the hash, and to use: fetched once
    assert two.read(1, 4) == b"789"
    with pytest.raises(FileNotFoundError):
        one.read(1, 4)


def test_listings_are_never_stale(place, bucket):
    place.write("iter_1/a", [b""])
    assert (place.list_names(), place.list_names("iter_1"), place.list_names("iter_2")) == (["iter_1"], ["a"], [])
    other_client().pipe_file(f"{bucket}/run/iter_1/b", b"")
    other_client().pipe_file(f"{bucket}/run/iter_2/c", b"")
    assert (place.list_names(), place.list_names("iter_1"), place.list_names("iter_2")) == (
        ["iter_1", "iter_2"],
        ["a", "b"],
        ["c"],
    )
    other_client().rm_file(f"{bucket}/run/iter_1/a")
    assert place.list_names("iter_1") == ["b"]


def test_bucket_works_without_prefix(bucket):
    place = ObjectStorage(f"s3://{bucket}/")
    place.write("iter_1/a", [b"1"])
    place.write("b", [b"2"])
    assert (place.name, place.list_names(), place.list_names("iter_1")) == (f"s3://{bucket}", ["b", "iter_1"], ["a"])


def test_newest_job_owns_prefix(any_place):
    first, second = Store(any_place), Store(ObjectStorage(any_place.name))
    first.storage.lock()
    save(first, 6)
    second.storage.lock()  # at once: whoever was before may have been killed
    taken = "directory-taken-over", f"process {os.getpid()}", any_place.name
    with raises(*taken):
        save(first, 7)
    with raises(*taken):
        first.remove(6)
    with raises(*taken):
        first.hide(6)
    assert second.iterations() == first.iterations() == [6]
    second.remove(6)
    with raises(*taken):
        first.remove_all()
    assert any_place.list_names("iter_0000007") == [
        shard_file_name(0),
        shard_file_name(1),
    ]  # perhaps the second one's, being written
    save(second, 7)
    assert second.iterations() == first.iterations() == [7]


def test_newest_generation_of_launch_owns_prefix(any_place):
    def store(job, generation):
        return Store(type(any_place)(any_place.name, claim=Claim(job, (0, generation), "run")))

    old, new = store("first", 3), store("first", 4)
    save(old, 6)
    save(new, 7)
    assert (old.read_manifest(7).run, old.read_manifest(7).job, old.read_manifest(7).term) == ("run", "first", (0, 4))
    for action in (lambda: save(old, 8), lambda: store("first", 3).take(), lambda: old.remove(6)):
        with raises("directory-taken-over", "generation 0.4", "generation 0.3"):
            action()
    save(store("second", 0), 8)
    with raises("directory-taken-over", any_place.name, "--ckpt-dir"):
        store("first", 5).take()
    assert new.iterations() == [6, 7, 8]


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"host": "elsewhere"}'])
def test_nothing_is_committed_without_readable_owner(any_place, content):
    store = Store(any_place)
    save(store, 6)  # a place that was never locked is nobody's
    any_place.lock()
    any_place.remove(".owner.json")
    if content is not None:
        any_place.write(".owner.json", [content])
    with raises("owner-unreadable", ".owner.json"):
        save(store, 7)
    assert store.iterations() == [6]


def test_forbidden_removal_raises_error(place, bucket):
    place.write("iter_1/a", [b"1"])
    statement = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:DeleteObject",
        "Resource": f"arn:aws:s3:::{bucket}/*",
    }
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    other_client().call_s3("put_bucket_policy", Bucket=bucket, Policy=policy)
    with pytest.raises(PermissionError, match=f"s3://{bucket}/run/iter_1: 1 of 1 objects"):
        place.remove("iter_1")


@pytest.mark.parametrize("name", ["*", "r*", "**", "[a-z]*", f"{MANIFEST}?versionId=1", "x[0]", "", "/x", "a b", ".*"])
def test_unusual_object_name_removes_no_other_objects(place, bucket, name):
    store = Store(place)
    save(store, 10)
    planted = f"run/iter_0000010/{name}"
    other_client().call_s3("put_object", Bucket=bucket, Key=planted, Body=b"x")
    save(store, 10)  # which removes what the manifest does not list
    store.remove_unpublished()
    assert store.iterations() == [10]
    assert torch.equal(read(store, 10).read_region("w", "master", Region((0, 0), (3, 5))), tensors(0)[0].values)
    store.remove(10)
    left = other_client().call_s3("list_objects_v2", Bucket=bucket)["Contents"]
    assert [one["Key"] for one in left] == [planted]


@pytest.mark.parametrize("root", ["run[12]", "run*", "run?"])
def test_prefix_is_not_used_as_pattern(bucket, root):
    place, other = (ObjectStorage(f"s3://{bucket}/{name}") for name in (root, "run1"))
    for one in (place, other):
        one.write("iter_0000010/x", [b"1"])
    place.remove("iter_0000010")
    assert (place.list_names("iter_0000010"), other.list_names("iter_0000010")) == ([], ["x"])


def test_object_storage_works_in_threads_and_forks(place):
    place.write("parent", [b"1"])
    child = multiprocessing.get_context("fork").Process(target=place.write, args=("child", [bytes(PART + 1)]))
    child.start()
    place.write("meanwhile", [b"2"])
    child.join(60)
    assert child.exitcode == 0
    assert place.list_names() == ["child", "meanwhile", "parent"]
    assert place.read("child") == bytes(PART + 1)


OPERATIONS = {
    "read": lambda place: place.read("file"),
    "blob": lambda place: place.open_blob("file"),
    "names": lambda place: place.list_names(),
    "write": lambda place: place.write("file", [b"1"]),
    "write in parts": lambda place: place.write("file", [bytes(PART)]),
    "remove": lambda place: place.remove("file"),
    "lock": lambda place: place.lock(),
}


def refused(operation, url, because):
    """Whether an operation fails with one sentence that names the place."""
    with pytest.raises(OSError, match=rf"^{url}(/\S+)?: {because}[^\n]*$"):
        OPERATIONS[operation](ObjectStorage(url, PART))


@each_row("operation", OPERATIONS)
def test_missing_bucket_is_one_sentence(server, operation):
    refused(operation, "s3://no-such-bucket/run", "the bucket does not exist: make it, or correct the address")


@pytest.mark.parametrize("operation", ["read", "names", "write in parts"])
def test_missing_credentials_are_one_sentence(bucket, operation, elsewhere):
    elsewhere.delenv("AWS_ACCESS_KEY_ID")
    elsewhere.delenv("AWS_SECRET_ACCESS_KEY")
    refused(operation, f"s3://{bucket}/run", "there are no credentials: set AWS_ACCESS_KEY_ID and")


@pytest.mark.parametrize("operation", ["write", "names"])
def test_wrong_endpoint_is_one_sentence(bucket, operation, elsewhere):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        elsewhere.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        elsewhere.setenv("AWS_MAX_ATTEMPTS", "1")
        refused(operation, f"s3://{bucket}/run", "it cannot be reached: check the network, and AWS_ENDPOINT_URL")


def test_unreadable_manifest_is_checkpoint_error(place):
    with raises("checkpoint-unreadable", "manifest.json"):
        Store(place).read_manifest(7)


def test_memory_file_system_shows_no_partial_file():
    place = ObjectStorage(f"memory://{uuid.uuid4().hex}", part_bytes=1)

    def parts():
        yield b"12"
        assert place.list_names() == []
        yield b"3"

    place.write("a", parts())
    assert fsspec.filesystem("memory").cat_file(place.display_path("a").removeprefix("memory:/")) == b"123"
