"""Fragments: what this rank's optimizer owns, cut into boxes of the unpartitioned model.

The arithmetic of ZeRO's shard boundaries, tensor and expert slices ends here; nobody else sees a flat buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer

from moc.state.optimizer import owned_slices
from moc.state.parameters import Piece, unpartitioned_parameters, unwrap
from moc.state.region import Region, boxes_of_range


@dataclass(frozen=True)
class Fragment:
    """A box of one slot of one tensor of the unpartitioned model, and the live memory that holds it here.

    Attributes:
        name: tensor name in the unpartitioned model.
        slot: ``master``, ``exp_avg``, ``exp_avg_sq`` (Adam) or ``momentum_buffer`` (SGD).
        global_shape: shape of the whole tensor.
        region: the box.
        view: contiguous live fp32 values, ``region.numel`` of them; writing into them restores the optimizer.
        first_copy: no other rank holds this fragment with a smaller replica number, so this one saves it.
        padded: see :class:`moc.state.parameters.Piece`.
    """

    name: str
    slot: str
    global_shape: tuple[int, ...]
    region: Region
    view: torch.Tensor
    first_copy: bool
    padded: bool


def optimizer_fragments(chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[Fragment]:
    """Yields every fragment of optimizer state that lives on this rank, in a fixed order."""
    pieces: dict[torch.nn.Parameter, list[Piece]] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        described = unpartitioned_parameters(model)
        pieces |= {parameter: described[name] for name, parameter in model.named_parameters()}
    for owned in owned_slices(optimizer):
        for piece in pieces[owned.parameter]:
            start = max(owned.start, piece.start)
            stop = min(owned.stop, piece.start + piece.region.numel)
            copy = piece.replica[:-1] if owned.sharded else piece.replica
            for position, box in boxes_of_range(piece.region.shape, start - piece.start, stop - piece.start):
                first = piece.start + position - owned.start
                for slot, values in owned.slots.items():
                    yield Fragment(
                        name=piece.name,
                        slot=slot,
                        global_shape=piece.global_shape,
                        region=box.shifted(piece.region.offset),
                        view=values[first : first + box.numel],
                        first_copy=not any(copy),
                        padded=piece.padded,
                    )
