"""The position of one worker in the layout of its job, in one generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moc.runtime.job import Job


@dataclass(frozen=True)
class World:
    """This worker's position in ``job``.  Ranks and sizes are those of torch.distributed and megatron-core."""

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
