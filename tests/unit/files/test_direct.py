"""Writes past the page cache: the same bytes as written one after the other, on every kind of file system."""

import errno
import mmap
import os
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.files import direct
from moc.files.direct import write_parts

MIB = 1 << 20
PAGE = 4096


def random_bytes(count: int) -> bytes:
    return os.urandom(count)


def written(path, parts) -> bytes:
    with open(path, "wb", buffering=0) as file:
        write_parts(file.fileno(), parts)
        assert not direct._is_direct(file.fileno())  # what follows may write any number of bytes
    return path.read_bytes()


@given(st.lists(st.one_of(st.integers(0, 3 * PAGE), st.sampled_from([8 * MIB - 1, 8 * MIB, 9 * MIB + 3])), max_size=5))
@settings(max_examples=30, deadline=None)
def test_a_file_has_the_bytes_of_its_parts(tmp_path_factory, sizes):
    parts = [random_bytes(size) for size in sizes]
    assert written(tmp_path_factory.mktemp("direct") / "file", map(memoryview, parts)) == b"".join(parts)


def test_arrays_of_any_type_may_be_empty(tmp_path):
    parts = [np.empty(0, np.float32), np.ones(3, np.float32), np.empty((0, 3), np.int64), b""]
    assert written(tmp_path / "file", parts) == np.ones(3, np.float32).tobytes()


@pytest.fixture
def ext4(tmp_path):
    """A file system of 64 MiB that supports direct writes."""
    image, place = tmp_path / "image", tmp_path / "place"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(64 * MIB)
    if shutil.which("mkfs.ext4") is None or os.geteuid():
        pytest.skip("a file system for direct writes needs root and mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, place]).returncode:
        pytest.skip("loop devices cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def cached_pages(path) -> int:
    """Pages of a file in the page cache."""
    found = subprocess.run(["fincore", "-bnro", "PAGES", path], capture_output=True, text=True, check=True)
    return int(found.stdout)


def test_large_files_do_not_pass_through_the_page_cache(ext4):
    if shutil.which("fincore") is None:
        pytest.skip("fincore counts pages in the cache")
    large, small = ext4 / "large", ext4 / "small"
    for path, size in ((large, 24 * MIB + 5), (small, MIB)):
        with open(path, "wb", buffering=0) as file:
            write_parts(file.fileno(), [random_bytes(size)])
    assert cached_pages(large) <= 1  # the last, partial block
    assert cached_pages(small) == MIB // mmap.PAGESIZE


def test_a_full_disk_raises(ext4):
    with open(ext4 / "file", "wb", buffering=0) as file, pytest.raises(OSError) as raised:
        write_parts(file.fileno(), (random_bytes(10 * MIB + 1) for _ in range(10)))
    assert raised.value.errno == errno.ENOSPC


def test_a_device_that_refuses_the_alignment_is_written_through_the_cache(tmp_path, monkeypatch):
    real, refused = os.write, []

    def write(file, data):
        if direct._is_direct(file):
            refused.append(len(data))
            raise OSError(errno.EINVAL, "alignment")
        return real(file, data)

    monkeypatch.setattr(direct.os, "write", write)
    monkeypatch.setattr(direct, "_FILE_SYSTEMS", frozenset({direct._kind_of(os.open(tmp_path, os.O_RDONLY))}))
    parts = [random_bytes(20 * MIB + 9)]
    found = written(tmp_path / "file", parts)
    assert found == parts[0]
    assert refused or not os.path.exists("/proc/self/mountinfo")


def test_a_write_that_ends_within_a_block_is_continued_through_the_cache(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(direct.os, "write", lambda file, data: real(file, data[:1000] if len(data) > 1000 else data))
    parts = [random_bytes(8 * MIB + 77)]
    assert written(tmp_path / "file", parts) == parts[0]
