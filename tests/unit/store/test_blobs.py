"""Files that are read by ranges: the bytes asked for, and those read ahead, no more."""

import os

import pytest

from moc.store import blobs
from moc.store.blobs import LocalBlob

PIECE = blobs._PIECE


@pytest.fixture
def reads(monkeypatch):
    """The bytes [start, stop) of each read of a file, while it is read."""
    seen, preadv = [], os.preadv

    def watched(descriptor, buffers, position):
        seen.append((position, position + sum(map(len, buffers))))
        return preadv(descriptor, buffers, position)

    monkeypatch.setattr(os, "preadv", watched)
    return seen


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 10), (3, 3), (5, PIECE + 5), (5, PIECE + 6), (PIECE - 1, 3 * PIECE), (7, 2 * PIECE)]
)
def test_reading_ahead_reads_each_byte_of_the_range_once_in_pieces(tmp_path, reads, start, stop):
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 3 * PIECE)
    LocalBlob(tmp_path / "file").will_read(start, stop)
    assert all(last - first <= PIECE for first, last in reads)
    assert [first for first, _ in reads] == list(range(start, stop, PIECE))
    assert [last for _, last in reads] == [*(first for first, _ in reads[1:]), *([stop] if stop > start else [])]


def test_nothing_is_read_ahead_of_what_is_in_memory(tmp_path, reads):
    (tmp_path / "file").write_bytes(b"hello")
    LocalBlob(tmp_path / "file", in_memory=True).will_read(0, 5)
    assert reads == []


def test_ranges_of_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"hello")
    blob = LocalBlob(tmp_path / "file")
    assert (blob.name, blob.size) == (str(tmp_path / "file"), 5)
    assert [bytes(blob.read(*span)) for span in ((0, 5), (1, 3), (4, 9), (2, 2))] == [b"hello", b"el", b"o", b""]
    (tmp_path / "empty").touch()
    empty = LocalBlob(tmp_path / "empty")
    assert empty.size == 0 and not empty.read(0, 1)
    with pytest.raises(FileNotFoundError):
        LocalBlob(tmp_path / "other")
