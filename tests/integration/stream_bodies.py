"""What workers of :mod:`tests.integration.test_streams` do."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron.pretraining.config import compose
from megatron.pretraining.process.initialize import initialize, seed_streams, shut_down


def draw(flags: dict, iterations: list[int]) -> dict:
    """The place of this worker, and the first number of each stream at the start of each iteration."""
    world = initialize(compose(flags))
    drawn = []
    for iteration in iterations:
        seed_streams(flags["seed"], iteration, world)
        with get_cuda_rng_tracker().fork():
            parallel = torch.rand(1).item()
        drawn.append({"default": torch.rand(1).item(), "tensor parallel": parallel})
    shut_down()
    return {"stage": world.pipeline_rank, "data": world.data_rank, "tensor": world.tensor_rank, "drawn": drawn}
