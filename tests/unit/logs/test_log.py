"""Logs: what is named is whole, memory is used again, bounded and given back, and a process may go at any moment."""

import contextlib
import threading

import pytest
import torch

from moc.logs.log import LogEntry, LogReader, LogWriter, log_directory, log_path
from moc.store.buffers import HostBuffer
from moc.store.errors import CheckpointError, DamagedTensorError, MissingTensorError
from moc.store.shard_file import read_stored_boxes
from moc.store.storage import LocalBlob
from tests.errors import only_code, raises

ENTRIES = [  # of any shapes; in a file the wide ones come first
    LogEntry("activation", (4, 1, 8), torch.bfloat16),
    LogEntry("gradient of a matrix", (3, 5), torch.float32),
    LogEntry("gradient of a vector", (7,), torch.bfloat16),
    LogEntry("norm", (), torch.float64),
]
KEYS = [entry.key for entry in ENTRIES]
SLOT = 4096 + 4 * 8 * 2 + 3 * 5 * 4 + 7 * 2 + 8
WORDS = dict(name="test log", limit_remedy="raise --limit", alternative="drop --logging")


@pytest.fixture
def directory(tmp_path):
    return log_directory(tmp_path, rank=3)


@pytest.fixture
def make(directory):
    """Makes writers, and closes them."""
    made = []

    def writer(slots: float = 4, **changes) -> LogWriter:
        arguments = dict(entries=ENTRIES, limit=slots * SLOT, device=torch.device("cpu"), **WORDS)
        made.append(LogWriter(directory, **arguments | changes))
        return made[-1]

    yield writer
    for one in made:
        one.close()


def tensor(iteration: int, key: str) -> torch.Tensor:
    number = KEYS.index(key)
    generator = torch.Generator().manual_seed(1000 * iteration + number)
    return torch.randn(ENTRIES[number].shape, generator=generator).to(ENTRIES[number].dtype)


def log(writer: LogWriter, *iterations: int, keys: list[str] | None = None) -> LogWriter:
    for iteration in iterations:
        writer.begin(iteration, keys)
        for key in reversed(keys or KEYS):  # the order is not that of the file
            writer.write(key, tensor(iteration, key))
        writer.end()
    writer.wait()
    return writer


def check(directory, iteration: int, keys: list[str] = KEYS) -> None:
    reader = LogReader(directory)
    for key in keys:
        read, held = reader.read(iteration, key), tensor(iteration, key)
        assert (read.dtype, read.shape) == (held.dtype, held.shape) and torch.equal(read, held)


def test_logged_tensors_are_read_by_key(make, directory):
    writer = log(make(), 9, 10)
    assert writer.log_bytes == SLOT
    assert LogReader(directory).iterations() == writer.iterations == [9, 10]
    for iteration in (9, 10):
        check(directory, iteration)
    assert writer.failure() is None


def test_unfinished_iteration_is_absent(make, directory):
    writer = log(make(), 1)
    writer.begin(2)
    for key in KEYS:
        writer.write(key, tensor(2, key))
    assert LogReader(directory).iterations() == [1]
    with raises("log-missing", "iteration 2"):
        LogReader(directory).read(2, KEYS[0])
    log(writer, 2)  # it was cut off, and is computed again
    assert LogReader(directory).iterations() == [1, 2]
    check(directory, 2)


def test_log_file_is_linked_last_and_link_failure_is_reported(make, directory, monkeypatch):
    def fail(slot, name):
        damages.extend(source.find_damage() for source in read_stored_boxes(LocalBlob(slot)))
        raise OSError("no-more-names")

    damages: list[str | None] = []
    monkeypatch.setattr("moc.logs.log.os.link", fail)
    writer = log(make(), 1)
    assert damages == [None] * len(KEYS) and LogReader(directory).iterations() == []
    assert only_code(writer.failure()) == "storage-unwritable" and "no-more-names" in writer.failure()


def test_damage_truncation_and_unknown_keys_are_detected(make, directory):
    log(make(), 1)
    with raises("log-missing", "other gradient"):
        LogReader(directory).read(1, "other gradient")
    with open(log_path(directory, 1), "r+b") as file:
        file.seek(SLOT - 1)
        file.write(b"\xff")
    with pytest.raises(DamagedTensorError):
        LogReader(directory).read(1, "gradient of a vector")  # the last one of the file
    LogReader(directory).read(1, KEYS[0])
    with open(log_path(directory, 1), "r+b") as file:
        file.truncate(SLOT - 1)
    with pytest.raises(MissingTensorError, match="truncated"):
        LogReader(directory).read(1, KEYS[0])


def test_collected_log_buffers_are_reused(make, directory):
    writer = log(make(), 1, 2, 3)
    inodes = {path.stat().st_ino for path in (directory / "slots").iterdir()}
    writer.collect(before=3)
    assert LogReader(directory).iterations() == [3] and writer.bytes == 3 * SLOT
    log(writer, 4, 5)
    assert {path.stat().st_ino for path in (directory / "slots").iterdir()} == inodes
    for iteration in (3, 4, 5):
        check(directory, iteration)
    assert writer.dropped_iterations == 0


def test_oldest_iterations_are_dropped_at_limit(make, directory):
    writer = log(make(slots=3.5), *range(1, 6))
    assert LogReader(directory).iterations() == writer.iterations == [3, 4, 5]
    assert writer.bytes == 3 * SLOT and writer.dropped_iterations == 2
    check(directory, 3)


def test_exhausted_memory_acts_as_limit(make, directory, monkeypatch):
    writer = make(slots=100)

    def no_more(*_, **__):
        raise CheckpointError("no room")

    monkeypatch.setattr("moc.logs.log.HostBuffer", no_more)
    log(writer, 1, 2, 3)
    assert LogReader(directory).iterations() == [2, 3] and writer.dropped_iterations == 1


def test_too_low_limit_is_refused(make):
    with raises("log-memory-too-small", f"{SLOT:,}", "--limit", "--logging"):
        make(slots=1.9)


def test_next_process_of_rank_takes_over_logs(make, directory):
    log(make(), 1, 2).begin(3)  # it is gone, without closing anything
    writer = make()
    assert writer.iterations == [1, 2]
    check(directory, 1)
    log(writer, 3)
    for iteration in (1, 2, 3):
        check(directory, iteration)
    writer.collect(before=3)
    assert LogReader(directory).iterations() == [3]


def test_logs_of_other_layout_are_discarded(make, directory):
    log(make(), 1).close()
    assert make(entries=ENTRIES[:-1], slots=8).iterations == [] == LogReader(directory).iterations()


def test_rollback_drops_later_iterations(make, directory):
    writer = log(make(), 1, 2, 3)
    writer.begin(2)
    assert LogReader(directory).iterations() == [1]


def test_unexpected_log_entries_are_refused(make):
    writer = make()
    writer.begin(1)
    writer.write(KEYS[0], tensor(1, KEYS[0]))
    for key, given in ((KEYS[0], tensor(1, KEYS[0])), (KEYS[1], torch.zeros(4, 5)), (KEYS[2], torch.zeros(7))):
        with raises("logging-unsupported", key, "iteration 1", "--logging"):
            writer.write(key, given)
    with raises("logging-unsupported", "norm", "iteration 1"):
        writer.end()


def test_iteration_may_log_subset_of_keys(make, directory):
    writer, some = log(make(), 1), [KEYS[3], KEYS[1]]
    log(writer, 2, keys=some)
    log(writer, 3)
    check(directory, 1)
    check(directory, 2, some)
    check(directory, 3)
    with raises("log-missing", KEYS[0]):
        LogReader(directory).read(2, KEYS[0])
    writer.begin(4, some)
    with raises("logging-unsupported", KEYS[0], "iteration 4"):
        writer.write(KEYS[0], tensor(4, KEYS[0]))


def test_close_keeps_complete_logs_and_delete_removes_all(make, directory):
    log(make(), 1).close()
    assert [path.name for path in directory.rglob("*") if path.is_file()] == [log_path(directory, 1).name]
    check(directory, 1)
    make().delete()
    assert not directory.exists()


def test_ended_generation_leaves_complete_logs_and_buffers(make, directory, monkeypatch):
    writer = log(make(), 1, 2)
    slots = {path.stat().st_ino for path in (directory / "slots").iterdir()}
    writer.begin(3)
    writer.write(KEYS[0], tensor(3, KEYS[0]))  # then another worker is lost
    writer.pause()
    assert LogReader(directory).iterations() == writer.iterations == [1, 2] and writer.bytes == 3 * SLOT
    monkeypatch.setattr("moc.logs.log.HostBuffer", None)  # nothing is allocated
    log(writer, 3)
    for iteration in (1, 2, 3):
        check(directory, iteration)
    assert {path.stat().st_ino for path in (directory / "slots").iterdir()} >= slots


def test_sleeping_thread_waits_for_copies_then_memory_is_freed(make, monkeypatch):
    """What is asked of CUDA; memory is the host's."""
    asked: list[tuple] = []

    def note(*what) -> None:
        asked.append((*what, threading.current_thread() is threading.main_thread()))

    class Event:
        def __init__(self, blocking: bool = False):
            assert blocking  # otherwise a core spins

        def synchronize(self):
            note("event")

    class Stream:
        def __init__(self, device=None):
            self.device = device

        def wait_stream(self, other):
            pass

        def record_event(self, event):
            return event

        def synchronize(self):
            note("stream")

    class Plain(HostBuffer):
        def __init__(self, nbytes, path, pin, **words):
            assert pin
            super().__init__(nbytes, path, **words)

        def close(self):
            note("freed")
            super().close()

    for name, value in dict(
        Event=Event, Stream=Stream, stream=lambda stream: contextlib.nullcontext(), current_stream=Stream,
        set_device=lambda device: note("device", device),
    ).items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr("moc.logs.log.HostBuffer", Plain)
    device = torch.device("cuda", 1)
    writer = log(make(device=device), 1)
    assert asked == [("device", device, False), ("event", False)]
    writer.begin(2)
    writer.write(KEYS[0], tensor(2, KEYS[0]))
    writer.close()
    assert asked[2:] == [("stream", True), ("freed", True), ("freed", True)]
