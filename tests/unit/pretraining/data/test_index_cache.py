"""The cache of sample indices: plain arrays of one's own."""

import os

import numpy
import pytest
from megatron.core.datasets import gpt_dataset

from megatron.pretraining.data import index_cache
from megatron.pretraining.data.index_cache import IndexCacheError


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def load():
    """How megatron-core reads."""
    before = gpt_dataset.numpy
    index_cache.read_plainly()
    yield lambda path: gpt_dataset.numpy.load(str(path), allow_pickle=True, mmap_mode="r")
    gpt_dataset.numpy = before


def test_a_plain_array_is_mapped(tmp_path, load):
    numpy.save(tmp_path / "plain.npy", numpy.arange(3), allow_pickle=True)
    read = load(tmp_path / "plain.npy")
    assert read.tolist() == [0, 1, 2] and isinstance(read, numpy.memmap)
    assert gpt_dataset.numpy.concatenate is numpy.concatenate


@pytest.mark.parametrize("kind", ["object array", "pickle", "nothing", "text"])
def test_anything_else_is_refused_and_does_not_run(tmp_path, load, kind):
    path, ran = tmp_path / "index.npy", tmp_path / "ran"
    if kind == "object array":
        numpy.save(path, numpy.array([Bomb(str(ran))], dtype=object), allow_pickle=True)
    elif kind == "pickle":
        numpy.array([Bomb(str(ran))], dtype=object).dump(path)
    else:
        path.write_text("" if kind == "nothing" else "text")
    with pytest.raises(IndexCacheError, match=f"{path} is no plain array .*: remove it, or pass --data-cache-path"):
        load(path)
    assert not ran.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("whose", ["directory", "file"])
def test_what_belongs_to_another_user_is_refused(tmp_path, load, whose, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    numpy.save(tmp_path / "plain.npy", numpy.arange(3))
    os.chown(tmp_path if whose == "directory" else tmp_path / "plain.npy", 1001, 1001)
    with pytest.raises(IndexCacheError, match="belongs to another user, and is not read"):
        load(tmp_path / "plain.npy")
