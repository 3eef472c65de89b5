"""Workers that are replicas of the whole model, without connections."""

import torch

from moc.runtime.job import Job, World


def replicas_world(rank: int, size: int, job: Job | None = None, backend: str = "gloo") -> World:
    """The place of a worker among data-parallel replicas on the CPU."""
    return World(
        rank=rank,
        size=size,
        device=torch.device("cpu"),
        backend=backend,
        tensor_rank=0,
        tensor_size=1,
        pipeline_rank=0,
        pipeline_size=1,
        data_rank=rank,
        data_size=size,
        job=job or Job(),
    )
