"""Fragments: what lives on this rank, cut into boxes of the unpartitioned model.

The arithmetic of ZeRO's shard boundaries, tensor and expert slices ends here; nobody else sees a flat buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer

from moc.state.operators import operator_of
from moc.state.optimizer import OwnedSlice, owned_slices
from moc.state.parameters import Piece, unpartitioned_buffers, unpartitioned_parameters, unwrap
from moc.state.region import Region, boxes_of_range

Pieces = dict[torch.Tensor, list[Piece]]


@dataclass(frozen=True, eq=False)
class Fragment:
    """A box of one slot of one tensor of the unpartitioned model, and the live memory that holds it here.

    Attributes:
        name: tensor name in the unpartitioned model.
        slot: ``master``, ``exp_avg``, ``exp_avg_sq`` (Adam) or ``momentum_buffer`` (SGD), in the formats that flags
            give them; ``param``, the values that the model computes with; ``grad``, the gradient.
        global_shape: shape of the whole tensor.
        region: the box.
        view: contiguous live values, ``region.numel`` of them.
        first_copy: no other rank holds this fragment with a smaller replica number, so this one saves it.
        padded: see :class:`moc.state.parameters.Piece`.
        tensor: the local parameter or buffer of the model that it belongs to.
        start: position of its first element in that tensor, flattened.
        replica: number of this copy: see :class:`moc.state.parameters.Piece`.
        sharded: the data-parallel peers hold other ranges (ZeRO), rather than copies of this one.
    """

    name: str
    slot: str
    global_shape: tuple[int, ...]
    region: Region
    view: torch.Tensor
    first_copy: bool
    padded: bool
    tensor: torch.Tensor
    start: int
    replica: tuple[int, ...]
    sharded: bool

    @property
    def operator(self) -> str:
        """The operator that it is part of; a ``ValueError`` if that is not known."""
        return operator_of(self.name)


def optimizer_fragments(chunks: list[torch.nn.Module], optimizer: MegatronOptimizer) -> Iterator[Fragment]:
    """Yields every fragment of optimizer state that lives on this rank, in a fixed order."""
    pieces = parameter_pieces(chunks)
    for owned in owned_slices(optimizer):
        yield from fragments_of(owned, pieces[owned.parameter])


def parameter_pieces(chunks: list[torch.nn.Module]) -> Pieces:
    """For each parameter of the model chunks its places in the unpartitioned model, in model order."""
    pieces: Pieces = {}
    for model in map(unwrap, chunks):
        described = unpartitioned_parameters(model)
        pieces |= {parameter: described[name] for name, parameter in model.named_parameters()}
    return pieces


def buffer_pieces(chunks: list[torch.nn.Module]) -> Pieces:
    """The same for what is trained without an optimizer: the biases by which routers balance their experts."""
    pieces: Pieces = {}
    for model in map(unwrap, chunks):
        buffers = dict(model.named_buffers())
        pieces |= {buffers[name]: described for name, described in unpartitioned_buffers(model).items()}
    return pieces


def fragments_of(owned: OwnedSlice, pieces: list[Piece]) -> Iterator[Fragment]:
    """Cuts a range of a local tensor into boxes of the unpartitioned model, and yields each of its slots.

    Args:
        owned: the range and its slots.
        pieces: the places of the tensor in the unpartitioned model.
    """
    for piece in pieces:
        start = max(owned.start, piece.start)
        stop = min(owned.stop, piece.start + piece.region.numel)
        copy = piece.replica[:-1] if owned.sharded else piece.replica
        for position, box in boxes_of_range(piece.region.shape, start - piece.start, stop - piece.start):
            position += piece.start
            for slot, values in owned.slots.items():
                yield Fragment(
                    name=piece.name,
                    slot=slot,
                    global_shape=piece.global_shape,
                    region=box.shifted(piece.region.offset),
                    view=values[position - owned.start : position - owned.start + box.numel],
                    first_copy=not any(copy),
                    padded=piece.padded,
                    tensor=owned.parameter,
                    start=position,
                    replica=piece.replica,
                    sharded=owned.sharded,
                )
