"""A directory as a place: files are there when they are whole, and one process has it at a time."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moc.store import storage
from moc.store.errors import CheckpointError
from moc.store.storage import LocalBlob, LocalStorage
from tests.errors import raises
from tests.unit.store.kills import kills

ROOT = Path(__file__).parents[3]
TAKES = """
import os, sys, time
from moc.store.storage import LocalStorage
place = LocalStorage(sys.argv[1], lock_timeout_s=0)
place.lock()
if "forks" in sys.argv:
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    (place.root / "child").write_text(str(child))
print("has it", flush=True)
time.sleep(100)
"""


@pytest.fixture
def place(tmp_path):
    return LocalStorage(tmp_path / "place", lock_timeout_s=0, in_memory=True)  # where any name may be removed


@pytest.fixture
def owner(place):
    """Starts a process that has the place."""
    started = []

    def start(*flags):
        process = subprocess.Popen(
            [sys.executable, "-c", TAKES, place.name, *flags], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout.readline() == "has it\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_files_and_directories_are_written_listed_and_removed(place):
    assert place.list_names() == [] and place.list_names("nowhere") == []
    place.write("b/one", [b"he", memoryview(b"llo"), bytearray()])
    place.write("a", [])
    assert place.read("b/one") == b"hello" and place.read("a") == b""
    assert place.list_names() == ["a", "b"] and place.list_names("b") == ["one"] and place.list_names("a") == []
    blob = place.open_blob("b/one")
    assert (blob.size, bytes(blob.read(1, 3)), blob.name) == (5, b"el", place.display_path("b/one"))
    assert place.open_blob("a").size == 0
    for reading in (place.read, place.open_blob):
        with pytest.raises(FileNotFoundError):
            reading("b/two")
    place.remove("b/two")
    place.remove("a")
    place.remove("b")
    assert place.list_names() == []
    assert place.free_bytes() > 0 and LocalStorage(place.root / "not" / "yet").free_bytes() > 0


def test_changing_blob_does_not_change_file(place):
    place.write("file", [b"hello"])
    place.open_blob("file").read(0, 5)[0] = 0
    assert place.read("file") == b"hello"


def broken(parts):
    yield from parts
    raise OSError("no more")


def test_failed_write_keeps_previous_file(place):
    place.write("file", [b"before"])
    with pytest.raises(OSError, match="no more"):
        place.write("file", broken([b"after"]))
    assert place.read("file") == b"before"
    with pytest.raises(OSError, match="no more"):
        place.write("other", broken([b"after"]))
    assert "other" not in place.list_names()


def test_write_killed_anywhere_leaves_old_or_new_file(place):
    place.write("file", [b"before"])

    def parts():
        for part in (b"af", b"ter", b""):
            sys.audit("a.part")
            yield part
        sys.audit("a.part")

    seen = set()
    for _ in kills(lambda: place.write("file", parts()), place.root):
        seen.add(place.read("file"))
        place.write("file", [b"before"])
        assert [name for name in place.list_names() if not name.startswith(".")] == ["file"]
    assert seen <= {b"before", b"after"} and b"before" in seen
    assert place.read("file") == b"after"


def test_second_process_is_refused_until_first_is_killed(place, owner):
    process = owner()
    with raises("directory-in-use", place.name, str(process.pid), "--ckpt-dir"):
        place.lock()
    process.send_signal(signal.SIGKILL)
    process.wait()
    place.lock()
    second = subprocess.run([sys.executable, "-c", TAKES, place.name], cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 1 and "TakenError" in second.stderr


def test_lock_is_acquired_after_owner_dies(place, owner):
    process = owner()
    process.send_signal(signal.SIGKILL)  # nobody waits for it yet
    LocalStorage(place.root, lock_timeout_s=60).lock()


def test_child_that_survives_owner_does_not_own_directory(place, owner):
    process = owner("forks")
    with pytest.raises(CheckpointError):
        place.lock()
    process.send_signal(signal.SIGKILL)
    process.wait()
    child = int((place.root / "child").read_text())
    os.kill(child, 0)  # it lives
    try:
        place.lock()
    finally:
        os.kill(child, signal.SIGKILL)


def test_concurrent_removal_by_others_is_tolerated(tmp_path, monkeypatch):
    place, rmtree = LocalStorage(tmp_path, in_memory=True), shutil.rmtree
    for name in ("logs/rank_0/a", "logs/rank_1/b"):
        place.write(name, [b"x"])

    def disturbed(path):
        monkeypatch.setattr(shutil, "rmtree", rmtree)
        rmtree(path / "rank_1")
        raise FileNotFoundError("rank_1")

    monkeypatch.setattr(shutil, "rmtree", disturbed)
    place.remove("logs")
    assert place.list_names() == []


PIECE = storage._READ_AHEAD_BYTES


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
def test_read_ahead_reads_each_byte_once(tmp_path, reads, start, stop):
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 3 * PIECE)
    LocalBlob(tmp_path / "file").will_read(start, stop)
    assert all(last - first <= PIECE for first, last in reads)
    assert [first for first, _ in reads] == list(range(start, stop, PIECE))
    assert [last for _, last in reads] == [*(first for first, _ in reads[1:]), *([stop] if stop > start else [])]


def test_memory_files_are_not_read_ahead(tmp_path, reads):
    (tmp_path / "file").write_bytes(b"hello")
    LocalBlob(tmp_path / "file", in_memory=True).will_read(0, 5)
    assert reads == []


def test_ranges_of_file_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"hello")
    blob = LocalBlob(tmp_path / "file")
    assert (blob.name, blob.size) == (str(tmp_path / "file"), 5)
    assert [bytes(blob.read(*span)) for span in ((0, 5), (1, 3), (4, 9), (2, 2))] == [b"hello", b"el", b"o", b""]
    (tmp_path / "empty").touch()
    empty = LocalBlob(tmp_path / "empty")
    assert empty.size == 0 and not empty.read(0, 1)
    with pytest.raises(FileNotFoundError):
        LocalBlob(tmp_path / "other")
