"""Nothing in a torch_dist checkpoint runs when it is read, and no file outside it is opened."""

import builtins
import io
import os
import pickle
import random

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron.pretraining.checkpoint.unpickling import check_metadata, nothing_runs
from moc.store.errors import CheckpointError
from tests.shared import ALL


class Bomb:
    """Leaves a file when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def directory(tmp_path):
    """A checkpoint as torch writes it."""
    dcp.save({"w": torch.arange(4.0), "b": torch.ones(2, dtype=torch.bfloat16)}, checkpoint_id=tmp_path, no_dist=True)
    return tmp_path


def read(directory):
    state = {"w": torch.zeros(4)}
    with nothing_runs():
        dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state["w"].tolist()


def changed(directory, change):
    """Unpickles ``.metadata``, changes it and writes it again."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_what_torch_wrote_is_read(directory):
    before = torch.load
    assert read(directory) == [0.0, 1.0, 2.0, 3.0] and check_metadata(directory) == ["w", "b"]
    assert torch.load is before and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert FileSystemReader(directory).read_metadata().state_dict_metadata.keys() == {"w", "b"}


@pytest.mark.parametrize(
    "bomb, named",
    [
        (lambda ran: Bomb(open, ran, "w"), f"{open.__module__}.open"),
        (lambda ran: Bomb(os.system, f"touch {ran}"), "posix.system"),
        (lambda ran: Bomb(builtins.eval, f"open({ran!r}, 'w')"), "builtins.eval"),
        (lambda ran: Bomb(torch.load, ran), "torch.serialization.load"),
    ],
    ids=["open", "system", "eval", "torch.load"],
)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in what torch wrote"])
def test_a_pickle_that_calls_is_refused_in_one_sentence(directory, tmp_path_factory, bomb, named, inside):
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


def test_an_object_in_the_place_of_a_tensor_is_not_unpickled(directory, tmp_path_factory):
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


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "", 3])
def test_no_file_outside_the_checkpoint_is_opened(directory, name):
    def change(metadata):
        for stored in metadata.storage_data.values():
            stored.relative_path = name

    changed(directory, change)
    with pytest.raises(CheckpointError, match="which is not in the checkpoint's directory"):
        check_metadata(directory)


@pytest.mark.parametrize("remember", [b"r" + (1 << 31).to_bytes(4, "little"), b"p2147483648\n"])
def test_a_few_bytes_do_not_take_all_memory(directory, remember):
    (directory / ".metadata").write_bytes(b"\x80\x02N" + remember + b".")
    with pytest.raises(CheckpointError, match="numbers an object 2147483648"):
        check_metadata(directory)


def test_any_bytes_are_metadata_or_an_error(directory):
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
