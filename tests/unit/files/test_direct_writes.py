"""Large files are written past the page cache where that is faster, with any sizes of their parts."""

import errno
import mmap
import os
import shutil
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moc.files import safe_directory
from moc.files.safe_directory import write_buffers

MIB = 1 << 20
PAGE = 4096


def random_bytes(count: int) -> bytes:
    return os.urandom(count)


def written(path, parts) -> bytes:
    with open(path, "wb", buffering=0) as file:
        write_buffers(file.fileno(), parts)
        assert not safe_directory._is_direct(file.fileno())  # what follows may write any number of bytes
    return path.read_bytes()


@given(st.lists(st.one_of(st.integers(0, 3 * PAGE), st.sampled_from([8 * MIB - 1, 8 * MIB, 9 * MIB + 3])), max_size=5))
@settings(max_examples=30, deadline=None)
def test_file_equals_concatenated_parts(tmp_path_factory, sizes):
    parts = [random_bytes(size) for size in sizes]
    assert written(tmp_path_factory.mktemp("direct") / "file", map(memoryview, parts)) == b"".join(parts)


def test_empty_arrays_of_any_type_are_written(tmp_path):
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
    output = subprocess.run(["fincore", "-bnro", "PAGES", path], capture_output=True, text=True, check=True)
    return int(output.stdout)


def test_large_files_bypass_page_cache(ext4):
    if shutil.which("fincore") is None:
        pytest.skip("fincore counts pages in the cache")
    large, small = ext4 / "large", ext4 / "small"
    for path, size in ((large, 24 * MIB + 5), (small, MIB)):
        with open(path, "wb", buffering=0) as file:
            write_buffers(file.fileno(), [random_bytes(size)])
    assert cached_pages(large) <= 1  # the last, partial block
    assert cached_pages(small) == MIB // mmap.PAGESIZE


def test_full_disk_raises_os_error(ext4):
    with open(ext4 / "file", "wb", buffering=0) as file, pytest.raises(OSError) as raised:
        write_buffers(file.fileno(), (random_bytes(10 * MIB + 1) for _ in range(10)))
    assert raised.value.errno == errno.ENOSPC


def test_device_that_refuses_alignment_uses_page_cache(tmp_path, monkeypatch):
    real, refused = os.write, []

    def write(file, data):
        if safe_directory._is_direct(file):
            refused.append(len(data))
            raise OSError(errno.EINVAL, "alignment")
        return real(file, data)

    monkeypatch.setattr(safe_directory.os, "write", write)
    monkeypatch.setattr(
        safe_directory,
        "_DIRECT_FILE_SYSTEMS",
        frozenset({safe_directory._file_system_of(os.open(tmp_path, os.O_RDONLY))}),
    )
    parts = [random_bytes(20 * MIB + 9)]
    contents = written(tmp_path / "file", parts)
    assert contents == parts[0]
    assert refused or not os.path.exists("/proc/self/mountinfo")


def test_unaligned_write_continues_through_page_cache(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(
        safe_directory.os, "write", lambda file, data: real(file, data[:1000] if len(data) > 1000 else data)
    )
    parts = [random_bytes(8 * MIB + 77)]
    assert written(tmp_path / "file", parts) == parts[0]
