"""``user_pretrain.py``, in which one bit of the state changes between its digest and its dense checkpoint.

``TEST_FLIP`` is the optimizer-state key of the changed tensor.  The first worker prints the operator.
"""

from __future__ import annotations

import contextlib
import os
import random
import runpy
from collections.abc import Iterator
from pathlib import Path
from unittest import mock


@contextlib.contextmanager
def flipped_before_saves(drawn: str | int) -> Iterator[list[str]]:
    """Context in which the first worker changes a bit in each save; yields the operators.

    Args:
        drawn: optimizer-state key of an expert's tensor, or a seed that draws any tensor of this worker.
    """
    import torch

    from megatron.pretraining.checkpoint.digests import dense_fragments
    from megatron.pretraining.entry import checkpoints

    real, changed = checkpoints.digest_state, []

    def digest_and_flip(parts, model, optimizer):
        digests = real(parts, model, optimizer)
        if parts.world.rank == 0:
            chance, chunks = random.Random(drawn), list(dense_fragments(parts, optimizer))
            if isinstance(drawn, str):
                chunks = [one for one in chunks if one.slot == drawn and ".expert." in one.operator]
            chunk = chance.choice(chunks)
            values = chunk.view.view(-1).view(torch.uint8)
            values[chance.randrange(len(values))] ^= 1 << chance.randrange(8)
            changed.append(chunk.operator)
            print(f"changed {chunk.operator}", flush=True)
        return digests

    with mock.patch.object(checkpoints, "digest_state", digest_and_flip):
        yield changed


if __name__ == "__main__":
    with flipped_before_saves(os.environ["TEST_FLIP"]):
        runpy.run_path(str(Path(__file__).with_name("user_pretrain.py")), run_name="__main__")
