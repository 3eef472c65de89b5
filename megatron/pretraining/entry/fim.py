"""Fill-in-the-middle data (``--fim-data``), whose samples are functions of their number."""

from __future__ import annotations

import functools
from typing import Any

from megatron.training.datasets.fim_dataset import GPTFIMDataset


def seed_by_sample() -> None:
    """Seeds the random numbers of a sample by its number; further calls do nothing.

    Megatron-LM draws them from one stream per dataset, so a sample depends on the samples read before it, and a
    resumed run would read different samples.
    """
    dataset: Any = GPTFIMDataset
    real = dataset._query_document_sample_shuffle_indices
    if hasattr(real, "__wrapped__"):
        return

    @functools.wraps(real)
    def query(self, idx):
        self.np_rng.seed([self.config.random_seed, int(idx)])
        return real(self, idx)

    dataset._query_document_sample_shuffle_indices = query
