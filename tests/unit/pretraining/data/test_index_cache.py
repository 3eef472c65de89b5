"""The cache of sample indices: plain arrays of one's own."""

import io
import os
import random
import zipfile

import numpy
import pytest

from megatron.pretraining.process import cpu
from tests.cases import each_row
from tests.errors import raises
from tests.shared import ALL

cpu.install()  # comes before megatron.core
from megatron.core.datasets import gpt_dataset  # noqa: E402

from megatron.pretraining.entry import streams  # noqa: E402
from megatron.pretraining.entry.streams import IndexCacheError  # noqa: E402


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def load():
    """How megatron-core reads."""
    before = gpt_dataset.safe_numpy_load
    streams.read_plainly()
    yield lambda path: gpt_dataset.safe_numpy_load(str(path), allow_pickle=True, mmap_mode="r")
    gpt_dataset.safe_numpy_load = before


def test_plain_array_is_memory_mapped(tmp_path, load):
    numpy.save(tmp_path / "plain.npy", numpy.arange(3), allow_pickle=True)
    read = load(tmp_path / "plain.npy")
    assert read.tolist() == [0, 1, 2] and isinstance(read, numpy.memmap)
    assert gpt_dataset.numpy.concatenate is numpy.concatenate


@each_row("kind", ["object array", "pickle", "nothing", "text", "archive", "no archive"])
def test_other_content_is_refused_and_not_run(tmp_path, load, kind):
    path, ran = tmp_path / "index.npy", tmp_path / "ran"
    if kind == "object array":
        numpy.save(path, numpy.array([Bomb(str(ran))], dtype=object), allow_pickle=True)
    elif kind == "pickle":
        numpy.array([Bomb(str(ran))], dtype=object).dump(path)
    elif kind == "archive":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("array.npy", "text")
    elif kind == "no archive":
        path.write_bytes(b"PK\x03\x04 and then no more of one")
    else:
        path.write_text("" if kind == "nothing" else "text")
    with raises("index-cache-unusable", str(path), "--data-cache-path"):
        load(path)
    assert not ran.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@each_row("whose", ["directory", "file"])
def test_cache_of_other_user_is_refused(tmp_path, load, whose, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    numpy.save(tmp_path / "plain.npy", numpy.arange(3))
    os.chown(tmp_path if whose == "directory" else tmp_path / "plain.npy", 1001, 1001)
    with raises("index-cache-unusable", "another user"):
        load(tmp_path / "plain.npy")


DTYPES = ["<i4", "|O", "O", "<U1000000000", "<M8[x]", "", "i" * 5000, "v0", None, -1, [[]], [("a", "|O")]]
DTYPES += [[("a", "<i4", 1 << 40)]]
SHAPES = [(6,), (), (-1,), (1 << 62,), (1 << 70,), (1 << 33, 1 << 33), (True,), (0.5,), "a", None, [6], ((6,),)]
SHAPES += [(1,) * 99]
TEXTS = ["", "{", "None", "[" * 9000, "(" * 200, "1 + 1", "{'descr': __import__('os').getcwd()}", "\0", "é"]
TEXTS += ["\n" * 70_000]


def described(rng: random.Random) -> bytes:
    """An array whose header says something else about it."""
    header = {"descr": "<i4", "fortran_order": False, "shape": (6,)}
    for _ in range(rng.randrange(3)):
        key, values = rng.choice([("descr", DTYPES), ("shape", SHAPES), ("fortran_order", SHAPES), ("more", TEXTS)])
        header[key] = rng.choice(values)
    if rng.random() < 0.2:
        del header[rng.choice(list(header))]
    text = (rng.choice(TEXTS) if rng.random() < 0.1 else repr(header)).encode()
    version = rng.choice([(1, 0)] * 5 + [(2, 0), (3, 0), (0, 0), (9, 9)])
    length = len(text) if rng.random() < 0.9 else rng.choice([0, 3, len(text) + 999, (1 << 32) - 1])
    size = 2 if version < (2, 0) else 4
    return b"\x93NUMPY" + bytes(version) + (length % (1 << 8 * size)).to_bytes(size, "little") + text + bytes(24)


def changed(rng: random.Random, whole: bytes) -> bytes:
    """A few bytes are others, or the end is missing."""
    data = bytearray(whole)
    for _ in range(rng.randrange(1, 5)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])


def test_arbitrary_bytes_give_plain_array_or_error(tmp_path, load):
    rng, path, whole, read = random.Random(0), tmp_path / "index.npy", io.BytesIO(), 0
    numpy.save(whole, numpy.arange(12, dtype=numpy.int32).reshape(6, 2))
    for _ in range(10_000 if ALL else 1000):
        path.write_bytes(changed(rng, whole.getvalue()) if rng.random() < 0.5 else described(rng))
        try:
            array = load(path)
        except IndexCacheError as error:
            assert str(error).isprintable() and len(str(error)) < 600
            continue
        read += 1
        assert isinstance(array, numpy.ndarray) and not array.dtype.hasobject
        assert array.nbytes <= path.stat().st_size
    assert read > 50
