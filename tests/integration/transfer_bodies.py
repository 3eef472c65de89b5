"""What workers of tests of transfers do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from moc.session.resume.survivors import Box, perform, transfers
from moc.state.operators import regions_of_range

SHAPE = (48, 5, 7)


def exchange_shards(old: list[list[int]], new: list[list[int]], most: int) -> bool:
    """Each rank holds some ranges of a flattened tensor, and wants others; whether it has them in the end."""
    dist.init_process_group("gloo")
    rank, values = dist.get_rank(), torch.arange(48.0 * 5 * 7).bfloat16()
    available, needed = ([[*regions_of_range(SHAPE, *span)] for span in spans] for spans in (old, new))
    boxes = [[[Box("t", "master", region, 2) for _, region in its] for its in one] for one in (available, needed)]
    found, missing = transfers(*boxes, most)
    mine = [(region, values[at : at + region.numel].clone()) for at, region in available[rank]]
    filled = [(region, torch.full((region.numel,), -1.0, dtype=values.dtype)) for _, region in needed[rank]]
    perform(found, mine, filled, torch.device("cpu"))
    right = [values[at : at + region.numel] for at, region in needed[rank]]
    whole = all(torch.equal(had, got) for had, (_, got) in zip(right, filled, strict=True))
    dist.barrier()
    dist.destroy_process_group()
    return whole and not missing
