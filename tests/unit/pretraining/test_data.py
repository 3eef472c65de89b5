"""Which samples a worker reads: by position alone."""

import contextlib
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.pretraining.config import ConfigError
from megatron.pretraining.process import cpu
from megatron.pretraining.process.topology import Topology
from moc.runtime import child_processes
from moc.runtime.job import Job
from tests.cases import each_row
from tests.replicas import replicas_world


@pytest.fixture(scope="module")
def data():
    """The module; importing megatron-core takes seconds."""
    cpu.install()
    from megatron.pretraining.data import streams as data

    return data


sizes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


JOB = Job()


def topology(rank, size, micro_batch_size, batch):
    """The place of a data-parallel rank."""
    world = replicas_world(rank, size, JOB)
    return Topology(world, micro_batch_size, batch)


def dealt(data_size, micro_batch_size, batch, of):
    """What all ranks get: in the first turn, then in the second, and so on."""
    shares = [of(topology(rank, data_size, micro_batch_size, batch)) for rank in range(data_size)]
    return [part for turn in zip(*shares, strict=True) for part in turn]


@given(sizes, st.integers(0, 1000))
def test_topologies_partition_batch_in_order(size, iteration):
    data_size, micro_batches, micro_batch_size = size
    batch = data_size * micro_batches * micro_batch_size
    consumed = iteration * batch
    read = dealt(data_size, micro_batch_size, batch, lambda one: one.samples(consumed))
    assert list(itertools.chain(*read)) == list(range(consumed, consumed + batch))
    numbers = dealt(data_size, micro_batch_size, batch, lambda one: one.micro_batches)
    assert numbers == list(range(data_size * micro_batches))


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 3))
def test_dummy_micro_batches_fill_last_round(data_size, micro_batches, micro_batch_size):
    for rank in range(data_size):
        one = topology(rank, data_size, micro_batch_size, micro_batches * micro_batch_size)
        numbers = [None if one.is_dummy(turn) else one.number(turn) for turn in range(one.rounds)]
        assert len(numbers) == -(-micro_batches // data_size) and None not in numbers[:-1]
        assert [number for number in numbers if number is not None] == list(one.micro_batches)


@each_row("data_size", [2, 3])
def test_dummy_micro_batch_has_no_counted_token(data, data_size):
    class Counted(Counting):
        def __getitem__(self, number):
            return {"tokens": torch.tensor([number]), "loss_mask": torch.ones(1)}

    stream, one = data.BatchStream(Counted(100)), topology(data_size - 1, data_size, 1, data_size + 1)
    for consumed in (0, data_size + 1):
        (real, ghost) = stream.iteration(one, consumed)
        assert (int(real["tokens"]), int(real["loss_mask"])) == (consumed + data_size - 1, 1)
        assert not ghost["loss_mask"].any()


@each_row("data_size", [2, 3, 6])
def test_batches_of_all_ranks_equal_single_rank(data, data_size):
    def read(size):
        return dealt(size, 2, 12, lambda one: drawn(data.BatchStream(Counting(100)), 24, one))

    assert read(data_size) == read(1)


class Counting(torch.utils.data.Dataset):
    """Samples that are their own numbers; notes who was read."""

    def __init__(self, size):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return {"tokens": torch.tensor([index])}


TWOS, ONES = topology(1, 2, 2, 8), topology(1, 2, 1, 4)


def drawn(stream, consumed, place=TWOS):
    return [batch["tokens"].flatten().tolist() for batch in stream.iteration(place, consumed)]


def test_stream_starts_anywhere_without_reading_earlier_data(data):
    dataset = Counting(100)
    stream = data.BatchStream(dataset)
    assert drawn(stream, 80) == [[82, 83], [86, 87]]
    assert dataset.read == [82, 83, 86, 87]
    assert drawn(stream, 88) == [[90, 91], [94, 95]]
    assert drawn(stream, 0) == [[2, 3], [6, 7]]  # and may go back: an iteration is computed again
    assert drawn(stream, 0) == [[2, 3], [6, 7]]


def test_iteration_after_interruption_is_complete(data):
    stream = data.BatchStream(Counting(100))
    iteration = stream.iteration(TWOS, 0)
    next(iteration)
    assert drawn(stream, 0) == [[2, 3], [6, 7]]


def test_generation_with_other_topology_keeps_samples(data, monkeypatch):
    stream, readers = data.BatchStream(Counting(100)), []
    make = stream._loader
    monkeypatch.setattr(stream, "_loader", lambda *where: readers.append(where) or make(*where))
    assert drawn(stream, 0) == [[2, 3], [6, 7]]
    assert drawn(stream, 8, topology(1, 2, 2, 8)) == [[10, 11], [14, 15]]
    assert len(readers) == 1  # a generation with the same topology reads on
    assert drawn(stream, 16, topology(0, 1, 2, 8)) == [[16, 17], [18, 19], [20, 21], [22, 23]]
    assert drawn(stream, 24, topology(2, 4, 2, 8)) == [[28, 29]]


def test_reader_serves_all_iterations_of_a_schedule(data, monkeypatch):
    stream, readers = data.BatchStream(Counting(100)), []
    make = stream._loader
    monkeypatch.setattr(stream, "_loader", lambda *where: readers.append(where) or make(*where))
    before = torch.get_rng_state()
    for consumed in (0, 8, 16):
        batches = stream.iteration(TWOS, consumed)
        assert [next(batches)["tokens"].flatten().tolist() for _ in range(2)][0] == [consumed + 2, consumed + 3]
    assert len(readers) == 1 and torch.equal(torch.get_rng_state(), before)


def test_evaluation_wraps_around(data):
    stream = data.BatchStream(Counting(5), wrap=True)
    assert drawn(stream, 4, ONES) == [[0], [2]]


def test_training_beyond_data_end_is_refused(data):
    stream = data.BatchStream(Counting(5))
    with pytest.raises(ConfigError, match="--global-batch-size"):
        drawn(stream, 4, ONES)


class _DevicesHeld(torch.utils.data.Dataset):
    """Each sample tells how many descriptors of a file its reader has."""

    def __init__(self, file: Path):
        self.file = file

    def __len__(self) -> int:
        return 8

    def __getitem__(self, _: int) -> dict[str, torch.Tensor]:
        return {"held": torch.tensor(descriptors_of(self.file))}


def descriptors_of(file: Path) -> int:
    held = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            held += descriptor.readlink() == file
    return held


@each_row("readers", [0, 1])
def test_data_readers_hold_no_gpu(data, tmp_path, monkeypatch, readers):
    """Otherwise a killed worker's memory would stay taken as long as its readers live."""
    monkeypatch.setattr(child_processes, "GPU_DEVICES", str(tmp_path / "nvidia"))
    with open(tmp_path / "nvidia0", "wb"):
        stream = data.BatchStream(_DevicesHeld(tmp_path / "nvidia0"), num_workers=readers)
        (batch,) = stream.iteration(topology(0, 1, 2, 2), 0)
        assert batch["held"].tolist() == [1 - readers] * 2
        assert descriptors_of(tmp_path / "nvidia0") == 1  # the worker itself keeps it
