"""Sends weights that several pipeline stages hold, embeddings tied to the output layer, between these stages.

Only the first of these stages saves them, so no other node has them in its memory.  After loading, that stage sends
them to the others, in any layout: ZeRO shards the same weights differently in each stage.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from moc.recovery.transfer import Box, perform, transfers
from moc.runtime.collectives import gather
from moc.state.fragments import Fragment
from moc.state.interface import TrainingState


def saved_elsewhere(fragment: Fragment) -> bool:
    """Whether an earlier pipeline stage, not this worker's, saves the tensor chunk."""
    return fragment.replica[0] != 0


def give_to_other_stages(state: TrainingState, fragments: Iterable[Fragment], takes: bool) -> None:
    """Fills the part of this worker's state that other stages save, from their loaded state; a collective call.

    All workers have loaded the tensor chunks that are not :func:`saved_elsewhere`.  With ``takes``, this worker
    receives the others; otherwise it keeps its state.

    Raises:
        ValueError: no stage saves a tensor chunk.
    """
    loaded = list(fragments)
    tied = set().union(*gather({one.name for one in loaded if takes and saved_elsewhere(one)}))
    if not tied:
        return
    held = [one for one in loaded if one.name in tied and not saved_elsewhere(one)]
    wanted = [one for one in loaded if takes and saved_elsewhere(one)]
    told = gather((_boxes(held), _boxes(wanted)))
    found, missing = transfers([its for its, _ in told], [its for _, its in told])
    if missing:
        raise ValueError(f"no pipeline stage saves all of {missing[0].slot} of {missing[0].name}")
    filled = [torch.empty_like(one.view) for one in wanted]
    perform(
        found,
        [(one.region, one.view) for one in held],
        [(one.region, values) for one, values in zip(wanted, filled, strict=True)],
    )
    for fragment, values in zip(wanted, filled, strict=True):
        state.load(fragment, values)


def _boxes(fragments: Iterable[Fragment]) -> list[Box]:
    return [Box(one.name, one.slot, one.region, one.view.itemsize) for one in fragments]
