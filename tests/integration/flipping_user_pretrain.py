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
    """Context in which a bit of a tensor of the first worker changes in each save, in all copies.

    Args:
        drawn: optimizer-state key of an expert's tensor, or a seed that draws any tensor except the biases of routers:
            with ZeRO-1, the digest has the first worker's, and the checkpoint may have another worker's.

    Yields:
        The operators that the first worker has changed.
    """
    import torch

    from megatron.pretraining.checkpoint.digests import dense_fragments
    from megatron.pretraining.entry import checkpoints
    from moc.runtime.collectives import gather
    from moc.state.operators import is_module_state

    real, changed = checkpoints.digest_state, []

    def digest_and_flip(parts, model, optimizer):
        digests = real(parts, model, optimizer)
        chunks = {(one.name, one.slot, one.region): one for one in dense_fragments(parts, optimizer)}
        if isinstance(drawn, str):
            drawable = [key for key, one in chunks.items() if one.slot == drawn and ".expert." in one.operator]
        else:
            drawable = [key for key, one in chunks.items() if not is_module_state(one.name)]
        key = gather(random.Random(drawn).choice(drawable))[0]
        if key in chunks:
            chance = random.Random(drawn)
            values = chunks[key].view.view(-1).view(torch.uint8)
            values[chance.randrange(len(values))] ^= 1 << chance.randrange(8)
        if parts.world.rank == 0:
            changed.append(chunks[key].operator)
            print(f"changed {changed[-1]}", flush=True)
        return digests

    with mock.patch.object(checkpoints, "digest_state", digest_and_flip):
        yield changed


if __name__ == "__main__":
    with flipped_before_saves(os.environ["TEST_FLIP"]):
        runpy.run_path(str(Path(__file__).with_name("user_pretrain.py")), run_name="__main__")
