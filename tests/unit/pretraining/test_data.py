"""Which samples a worker reads: by position alone."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.pretraining.process import cpu


@pytest.fixture(scope="module")
def data():
    """The module; importing megatron-core takes seconds."""
    cpu.install()
    from megatron.pretraining.data import streams as data

    return data


sizes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))


@given(sizes, st.integers(0, 1000))
def test_an_iteration_reads_the_next_samples_once(data, size, iteration):
    data_size, micro_batches, micro_batch_size = size
    batch = data_size * micro_batches * micro_batch_size
    consumed = iteration * batch
    read = [
        list(data.micro_batch_indices(consumed, micro_batch, micro_batch_size, rank, data_size))
        for micro_batch, rank in itertools.product(range(micro_batches), range(data_size))
    ]
    assert list(itertools.chain(*read)) == list(range(consumed, consumed + batch))


class Counting(torch.utils.data.Dataset):
    """Samples that are their own numbers; notes who was read."""

    def __init__(self, size):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return {"tokens": torch.tensor([index])}


class Place:
    """A worker's place, as far as a stream looks at it."""

    device, data_rank, data_size = torch.device("cpu"), 1, 2


def drawn(stream, consumed):
    return [batch["tokens"].flatten().tolist() for batch in stream.iteration(consumed)]


def test_a_stream_starts_anywhere_and_reads_nothing_before(data):
    dataset = Counting(100)
    stream = data.BatchStream(dataset, 2, 2, Place)
    assert drawn(stream, 80) == [[82, 83], [86, 87]]
    assert dataset.read == [82, 83, 86, 87]
    assert drawn(stream, 88) == [[90, 91], [94, 95]]
    assert drawn(stream, 0) == [[2, 3], [6, 7]]  # and may go back: an iteration is computed again
    assert drawn(stream, 0) == [[2, 3], [6, 7]]


def test_after_a_broken_iteration_the_next_one_is_whole(data):
    stream = data.BatchStream(Counting(100), 2, 2, Place)
    iteration = stream.iteration(0)
    next(iteration)
    assert drawn(stream, 0) == [[2, 3], [6, 7]]


def test_evaluation_wraps_around(data):
    stream = data.BatchStream(Counting(5), 1, 2, Place, wrap=True)
    assert drawn(stream, 4) == [[0], [2]]


def test_training_does_not_wrap(data):
    stream = data.BatchStream(Counting(5), 1, 2, Place)
    with pytest.raises((StopIteration, RuntimeError)):
        drawn(stream, 4)
