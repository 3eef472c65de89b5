"""Samples of fill-in-the-middle data depend on their number, and not on what has been read before."""

from types import SimpleNamespace

import numpy
import pytest

from megatron.pretraining.process import cpu

cpu.install()

from megatron.training.datasets.fim_dataset import GPTFIMDataset  # noqa: E402

from megatron.pretraining.entry import streams  # noqa: E402


@pytest.fixture
def dataset(monkeypatch):
    """One whose samples are the next random numbers."""
    name = "_query_document_sample_shuffle_indices"
    monkeypatch.setattr(GPTFIMDataset, name, lambda self, idx: list(self.np_rng.randint(1 << 30, size=4)))
    streams.seed_by_sample()
    streams.seed_by_sample()
    made = GPTFIMDataset.__new__(GPTFIMDataset)
    made.np_rng, made.config = numpy.random.RandomState(1), SimpleNamespace(random_seed=5)
    return made._query_document_sample_shuffle_indices


def test_sample_depends_only_on_its_number(dataset):
    first = dataset(3)
    assert dataset(numpy.int64(4)) != first
    assert dataset(3) == first


def test_samples_differ_between_seeds(dataset):
    first = dataset(3)
    dataset.__self__.config.random_seed = 6
    assert dataset(3) != first
