"""Logs: what is named is whole, memory is used again, bounded and given back, and a process may go at any moment."""

import re

import pytest
import torch

from moc.logs.crossings import Crossing, Direction
from moc.logs.files import LogReader, directory_of, path_of
from moc.logs.writer import LogWriter
from moc.store.blobs import LocalBlob
from moc.store.errors import CheckpointError, DamagedRegionError, MissingRegionError
from moc.store.regions import read_sources

CROSSINGS = [Crossing(direction, chunk, i) for direction in Direction for chunk in range(2) for i in range(3)]
SHAPE, DTYPE = (4, 1, 8), torch.bfloat16
SLOT = 4096 + len(CROSSINGS) * 4 * 8 * 2


@pytest.fixture
def directory(tmp_path):
    return directory_of(tmp_path, rank=3)


@pytest.fixture
def make(directory):
    """Makes writers, and closes them."""
    made = []

    def writer(slots: float = 4, **changes) -> LogWriter:
        arguments = dict(crossings=CROSSINGS, shape=SHAPE, dtype=DTYPE, limit=slots * SLOT, device=torch.device("cpu"))
        made.append(LogWriter(directory, **arguments | changes))
        return made[-1]

    yield writer
    for one in made:
        one.close()


def tensor(iteration: int, crossing: Crossing) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * iteration + CROSSINGS.index(crossing))
    return torch.randn(SHAPE, generator=generator).to(DTYPE)


def log(writer: LogWriter, *iterations: int) -> LogWriter:
    for iteration in iterations:
        writer.begin(iteration)
        for crossing in reversed(CROSSINGS):  # the order is that of the schedule, not of the file
            writer.write(crossing, tensor(iteration, crossing))
        writer.end()
    writer.wait()
    return writer


def check(directory, iteration: int) -> None:
    reader = LogReader(directory)
    for crossing in CROSSINGS:
        read = reader.read(iteration, crossing)
        assert read.dtype == DTYPE and torch.equal(read, tensor(iteration, crossing))


def test_what_was_written_is_read_by_its_key(make, directory):
    writer = log(make(), 9, 10)
    assert writer.slot_bytes == SLOT
    assert LogReader(directory).iterations() == writer.iterations == [9, 10]
    for iteration in (9, 10):
        check(directory, iteration)
    assert writer.failure() is None


def test_an_iteration_that_is_not_over_is_not_there(make, directory):
    writer = log(make(), 1)
    writer.begin(2)
    for crossing in CROSSINGS:
        writer.write(crossing, tensor(2, crossing))
    assert LogReader(directory).iterations() == [1]
    with pytest.raises(MissingRegionError, match="iteration 2 was not logged"):
        LogReader(directory).read(2, CROSSINGS[0])
    log(writer, 2)  # it was cut off, and is computed again
    assert LogReader(directory).iterations() == [1, 2]
    check(directory, 2)


def test_a_name_comes_last_and_where_there_is_none_it_is_said(make, directory, monkeypatch):
    def fail(slot, name):
        damages.extend(source.damage() for source in read_sources(LocalBlob(slot)))
        raise OSError("no more names")

    damages: list[str | None] = []
    monkeypatch.setattr("moc.logs.writer.os.link", fail)
    writer = log(make(), 1)
    assert damages == [None] * len(CROSSINGS) and LogReader(directory).iterations() == []
    assert "cannot be written (no more names)" in writer.failure()


def test_damage_and_another_layout_are_found(make, directory):
    log(make(), 1)
    with pytest.raises(MissingRegionError, match="holds no forward tensor of micro batch 7 and chunk 0"):
        LogReader(directory).read(1, Crossing(Direction.FORWARD, 0, 7))
    with open(path_of(directory, 1), "r+b") as file:
        file.seek(SLOT - 1)
        file.write(b"\xff")
    with pytest.raises(DamagedRegionError):
        LogReader(directory).read(1, CROSSINGS[-1])
    LogReader(directory).read(1, CROSSINGS[0])
    with open(path_of(directory, 1), "r+b") as file:
        file.truncate(SLOT - 1)
    with pytest.raises(MissingRegionError, match="truncated"):
        LogReader(directory).read(1, CROSSINGS[0])


def test_collected_memory_is_used_again(make, directory):
    writer = log(make(), 1, 2, 3)
    inodes = {path.stat().st_ino for path in (directory / "slots").iterdir()}
    writer.collect(before=3)
    assert LogReader(directory).iterations() == [3] and writer.bytes == 3 * SLOT
    log(writer, 4, 5)
    assert {path.stat().st_ino for path in (directory / "slots").iterdir()} == inodes
    for iteration in (3, 4, 5):
        check(directory, iteration)
    assert writer.given_up == 0


def test_the_oldest_go_where_there_is_no_room(make, directory):
    writer = log(make(slots=3.5), *range(1, 6))
    assert LogReader(directory).iterations() == writer.iterations == [3, 4, 5]
    assert writer.bytes == 3 * SLOT and writer.given_up == 2
    check(directory, 3)


def test_memory_that_ends_is_a_limit(make, directory, monkeypatch):
    writer = make(slots=100)

    def no_more(*_, **__):
        raise CheckpointError("no room")

    monkeypatch.setattr("moc.logs.writer.Buffer", no_more)
    log(writer, 1, 2, 3)
    assert LogReader(directory).iterations() == [2, 3] and writer.given_up == 1


def test_too_low_a_limit_is_refused(make):
    with pytest.raises(CheckpointError, match=re.escape(f"need {SLOT:,} bytes") + ".*raise --upstream-log-limit"):
        make(slots=1.9)


def test_the_next_process_of_the_rank_takes_over(make, directory):
    log(make(), 1, 2).begin(3)  # it is gone, without closing anything
    writer = make()
    assert writer.iterations == [1, 2]
    check(directory, 1)
    log(writer, 3)
    for iteration in (1, 2, 3):
        check(directory, iteration)
    writer.collect(before=3)
    assert LogReader(directory).iterations() == [3]


def test_what_is_of_another_layout_is_not_taken_over(make, directory):
    log(make(), 1).close()
    assert make(shape=(8, 1, 8), slots=8).iterations == [] == LogReader(directory).iterations()


def test_a_run_that_went_back_drops_what_is_to_come_again(make, directory):
    writer = log(make(), 1, 2, 3)
    writer.begin(2)
    assert LogReader(directory).iterations() == [1]


def test_what_was_not_announced_is_refused(make):
    writer = make()
    writer.begin(1)
    writer.write(CROSSINGS[0], tensor(1, CROSSINGS[0]))
    for wrong, sent in ((CROSSINGS[0], torch.zeros(SHAPE, dtype=DTYPE)), (CROSSINGS[1], torch.zeros(SHAPE))):
        with pytest.raises(CheckpointError, match="is not what was to be sent in iteration 1"):
            writer.write(wrong, sent)
    with pytest.raises(CheckpointError, match="was not sent in iteration 1"):
        writer.end()


def test_closing_leaves_what_is_whole_and_forgetting_nothing(make, directory):
    log(make(), 1).close()
    assert [path.name for path in directory.rglob("*") if path.is_file()] == [path_of(directory, 1).name]
    check(directory, 1)
    make().delete()
    assert not directory.exists()
