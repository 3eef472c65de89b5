"""Nothing in a torch_dist checkpoint runs when it is read, and no file outside it is opened."""

import argparse
import builtins
import io
import os
import pickle
import random
import struct
import time
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron.pretraining.process import cpu

cpu.install()  # comes before megatron.core
from megatron.core.safe_globals import register_safe_globals  # noqa: E402

from megatron.pretraining.checkpoint.unpickling import check_metadata, restricted_unpickling  # noqa: E402
from moc.errors import code_of  # noqa: E402
from moc.files import safe_directory  # noqa: E402
from moc.store.errors import CheckpointError  # noqa: E402
from tests.cases import each_row  # noqa: E402
from tests.shared import ALL  # noqa: E402


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def written_checkpoint(tmp_path):
    """A checkpoint as torch writes it."""
    dcp.save({"w": torch.arange(4.0), "b": torch.ones(2, dtype=torch.bfloat16)}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


@pytest.fixture
def directory(tmp_path):
    return written_checkpoint(tmp_path)


def read(directory):
    state = {"w": torch.zeros(4)}
    with restricted_unpickling():
        dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state["w"].tolist()


def changed(directory, change):
    """Unpickles ``.metadata``, changes it and writes it again."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_torch_checkpoint_is_read(directory):
    before = torch.load
    assert read(directory) == [0.0, 1.0, 2.0, 3.0] and check_metadata(directory) == ["w", "b"]
    assert torch.load is before and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert FileSystemReader(directory).read_metadata().state_dict_metadata.keys() == {"w", "b"}


@each_row(
    "bomb, named",
    [
        (lambda ran: Bomb(open, ran, "w"), f"{open.__module__}.open"),
        (lambda ran: Bomb(os.system, f"touch {ran}"), "posix.system"),
        (lambda ran: Bomb(builtins.eval, f"open({ran!r}, 'w')"), "builtins.eval"),
        (lambda ran: Bomb(torch.load, ran), "torch.serialization.load"),
    ],
    ids=["open", "system", "eval", "torch.load"],
)
@each_row("inside", [False, True], ids=["alone", "in what torch wrote"])
def test_pickle_with_call_is_refused_and_not_run(tmp_path, tmp_path_factory, bomb, named, inside):
    directory = written_checkpoint(tmp_path)
    ran = tmp_path_factory.mktemp("bomb") / "ran"
    if inside:
        changed(directory, lambda metadata: setattr(metadata, "planner_data", bomb(str(ran))))
    else:
        (directory / ".metadata").write_bytes(pickle.dumps(bomb(str(ran))))
    with pytest.raises(CheckpointError, match=f"{directory}/.metadata asks for {named}, which no torch_dist"):
        check_metadata(directory)
    with pytest.raises((CheckpointError, CheckpointException)):
        read(directory)
    assert not ran.exists()


def test_object_replacing_tensor_is_not_unpickled(directory, tmp_path_factory):
    ran = tmp_path_factory.mktemp("bomb") / "ran"
    data = io.BytesIO()
    torch.save(Bomb(open, str(ran), "w"), data)
    (directory / "bomb.distcp").write_bytes(data.getvalue())

    def change(metadata):
        metadata.state_dict_metadata["w"] = BytesStorageMetadata()
        (where,) = (stored for index, stored in metadata.storage_data.items() if index.fqn == "b")
        stored = type(where)("bomb.distcp", 0, len(data.getvalue()))
        metadata.storage_data = {MetadataIndex("w"): stored}

    changed(directory, change)
    with pytest.raises(CheckpointException, match="weights_only|Weights only"):
        read(directory)
    assert not ran.exists()


@each_row("name", ["../secret", "/etc/passwd", "a/b", "..", "", 3])
def test_file_outside_checkpoint_is_not_opened(tmp_path, name):
    directory = written_checkpoint(tmp_path)

    def change(metadata):
        for stored in metadata.storage_data.values():
            stored.relative_path = name

    changed(directory, change)
    with pytest.raises(CheckpointError, match="not in"):
        check_metadata(directory)


@pytest.mark.parametrize("remember", [b"r" + (1 << 31).to_bytes(4, "little"), b"p2147483648\n"])
def test_short_metadata_cannot_exhaust_memory(directory, remember):
    (directory / ".metadata").write_bytes(b"\x80\x02N" + remember + b".")
    with pytest.raises(CheckpointError, match="2147483648"):
        check_metadata(directory)


@each_row(
    "content", ["[1]", "1", "{}", '{"sharded_backend": {}}', '{"sharded_backend": "a", "sharded_backend_version": "1"}']
)
def test_format_name_is_checked_before_megatron_core(tmp_path, content):
    directory = written_checkpoint(tmp_path)
    (directory / "metadata.json").write_text(content)
    with pytest.raises(CheckpointError, match="metadata.json"):
        check_metadata(directory)


def test_arbitrary_bytes_give_metadata_or_error(directory):
    rng, path = random.Random(0), directory / ".metadata"
    whole = path.read_bytes()
    for _ in range(10_000 if ALL else 1000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])
        try:
            check_metadata(directory)
        except CheckpointError:
            pass


def saved(*values):
    """What ``torch.save`` writes, as records by name."""
    stream = io.BytesIO()
    torch.save(*values, stream)
    with zipfile.ZipFile(stream) as archive:
        return {one.filename: archive.read(one) for one in archive.infolist()}


def archive(records, how=zipfile.ZIP_STORED):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", how) as made:
        for name, data in records.items():
            made.writestr(name, data)
    return stream.getvalue()


def with_pickle(data):
    records = saved({"a": 1})
    return archive({name: data if name.endswith("data.pkl") else old for name, old in records.items()})


def doubled(levels):
    found = ()
    for _ in range(levels):
        found = (found, found)
    stream = io.BytesIO()
    pickle.Pickler(stream, 2).dump(found)
    return stream.getvalue()[:-1]


def a_bomb():
    name, *_ = saved({"a": 1})
    return archive({**saved({"a": 1}), f"{name.partition('/')[0]}/data/0": bytes(200 << 20)}, zipfile.ZIP_DEFLATED)


def a_lie():
    """A tensor of a gigabyte, of which four bytes are there."""
    records = saved({"a": torch.zeros(1)})
    stream = {name: data for name, data in records.items() if name.endswith("data.pkl")}
    ((name, data),) = stream.items()
    large, one = b"J" + (1 << 28).to_bytes(4, "little"), b"K\x01"
    return archive({**records, name: data.replace(one, large)})


def a_long_list(path):
    """An archive whose end tells of a list of records with 64 GB, in a file with holes."""
    records = safe_directory.MAX_MANIFEST_BYTES << 10
    record = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1 << 20, 1 << 20, records, 0)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, records, 1)
    with path.open("wb") as file:
        file.seek(records)
        file.write(record + locator + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, *[0xFFFF] * 2, *[0xFFFFFFFF] * 2, 0))


HOSTILE = {
    "compressed": a_bomb,
    "a tensor that is not there": a_lie,
    "64 GB of zeros": lambda: with_pickle(b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R."),
    "a key of 2^60 steps": lambda: with_pickle(b"\x80\x02}" + doubled(60)[2:] + b"Ns."),
    "a key of 2^14 steps, often": lambda: with_pickle(
        b"\x80\x02" + doubled(14)[2:] + b"r\xff\x00\x00\x000}(" + b"j\xff\x00\x00\x00N" * 100_000 + b"u."
    ),
    "numbers with one hash": lambda: with_pickle(
        b"\x80\x02}(" + b"".join(b"\x8a\x0a" + ((2**61 - 1) * n).to_bytes(10, "little") + b"N" for n in range(70_000))
        + b"u."
    ),
    "no archive": lambda: pickle.dumps({"a": 1}),
    "nothing": bytes,
}  # fmt: skip


@each_row("hostile", HOSTILE.values(), ids=HOSTILE)
def test_hostile_objects_are_refused_quickly(tmp_path, hostile):
    path = tmp_path / "common.pt"
    path.write_bytes(hostile())
    began = time.process_time()
    with restricted_unpickling():
        for source in (path, io.BytesIO(path.read_bytes())):
            with pytest.raises(CheckpointError):
                torch.load(source, weights_only=True)
    assert time.process_time() - began < 30  # seconds, and not years


def test_file_with_long_record_list_is_refused(tmp_path):
    a_long_list(tmp_path / "model_optim_rng.pt")
    with restricted_unpickling(), pytest.raises(CheckpointError) as refused:
        torch.load(tmp_path / "model_optim_rng.pt", weights_only=True)
    assert code_of(refused.value) == "metadata-refused"


def test_tensors_may_exceed_object_size_limit(tmp_path):
    weights = torch.arange(safe_directory.MAX_MANIFEST_BYTES // 4 + 1, dtype=torch.float32)
    torch.save({"model": {"weight": weights}, "iteration": 3}, tmp_path / "model_optim_rng.pt")
    assert (tmp_path / "model_optim_rng.pt").stat().st_size > safe_directory.MAX_MANIFEST_BYTES
    with restricted_unpickling():
        loaded = torch.load(tmp_path / "model_optim_rng.pt")
    assert loaded["iteration"] == 3 and loaded["model"]["weight"].equal(weights)


@each_row("make", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd"), os.mkdir])
def test_only_regular_files_are_loaded(tmp_path, make):
    make(tmp_path / "common.pt")
    with restricted_unpickling(), pytest.raises(OSError):
        torch.load(tmp_path / "common.pt", weights_only=True)


def test_stock_checkpoint_contents_are_loaded(tmp_path):
    flags = argparse.Namespace(**{f"flag_{n}": [n, -n, "x", None, 1 << 70] for n in range(900)})
    state = {"args": flags, "iteration": 3, "rng": [torch.get_rng_state()], "half": torch.ones(3, dtype=torch.bfloat16)}
    torch.save(state, tmp_path / "common.pt")
    register_safe_globals()
    with restricted_unpickling():
        loaded = torch.load(tmp_path / "common.pt")
    assert loaded["args"] == flags and loaded["half"].tolist() == [1, 1, 1]
