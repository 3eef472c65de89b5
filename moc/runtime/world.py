"""Describes the position of a worker in its job's layout, in one generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moc.runtime.job import Job


@dataclass(frozen=True)
class World:
    """This worker's position in ``job``.  Ranks and sizes are as in torch.distributed and megatron-core.

    ``data_size`` counts the copies of the model that compute samples.  Other workers of a pipeline stage *help*: they
    have higher data-parallel ranks, and no samples.
    """

    rank: int
    size: int
    device: torch.device
    backend: str
    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    job: Job

    @property
    def helps(self) -> bool:
        """Whether this worker belongs to no complete copy of the model."""
        return self.data_rank >= self.data_size
