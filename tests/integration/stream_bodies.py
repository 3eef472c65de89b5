"""What workers of :mod:`tests.integration.test_streams` do."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron.pretraining.process.initialize import seed_streams, shut_down
from moc.runtime.job import Job
from tests.integration.own_program import program_of


def draw(flags: dict, iterations: list[int]) -> dict:
    """The place of this worker, and the first number of each stream at the start of each iteration."""
    config, program = program_of(flags)
    world = program.connect(config, Job())
    drawn = []
    for iteration in iterations:
        seed_streams(flags["seed"], iteration, world)
        with get_cuda_rng_tracker().fork():
            parallel = torch.rand(1).item()
        drawn.append({"default": torch.rand(1).item(), "tensor parallel": parallel})
    shut_down()
    return {"stage": world.pipeline_rank, "data": world.data_rank, "tensor": world.tensor_rank, "drawn": drawn}
