"""Fragments: what lives on this rank, cut into boxes of the unpartitioned model.

An engine says of each local tensor which boxes of the unpartitioned model it holds (:class:`Piece`), and of which
range of it this rank owns the optimizer state (:class:`OwnedSlice`); :func:`fragments_of` cuts one by the other.  The
arithmetic of ZeRO's shard boundaries, tensor and expert slices ends here; nobody else sees a flat buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from moc.state.operators import operator_of
from moc.state.region import Region, boxes_of_range


@dataclass(frozen=True)
class Piece:
    """A contiguous part of a local parameter, and where it belongs in the unpartitioned model.

    Attributes:
        name: name of the tensor in the unpartitioned model, with global layer and expert numbers.
        global_shape: shape of that tensor.
        region: the box of that tensor which ``view`` holds.
        view: the local values; shares memory with the parameter.
        start: position of the first element of ``view`` in the flattened local parameter.
        replica: number of this copy, (stage, tensor-parallel rank, data-parallel
            rank); all zeros for the first copy.
        padded: the global shape depends on the layout (vocabulary padded for tensor parallelism); what lies
            beyond the smaller of two such shapes is padding.
    """

    name: str
    global_shape: tuple[int, ...]
    region: Region
    view: torch.Tensor
    start: int
    replica: tuple[int, ...]
    padded: bool


@dataclass(frozen=True)
class OwnedSlice:
    """The range [start, stop) of a flattened model parameter whose optimizer state lives on this rank.

    Attributes:
        parameter: the model parameter, or a buffer that is saved like one.
        start: first element owned.
        stop: one past the last element owned.
        slots: 1-D live tensors of ``stop - start`` elements by slot name (``master``, ``exp_avg``, ``exp_avg_sq``),
            in the formats that flags give them; writing into them restores the optimizer.
        sharded: whether the data-parallel peers own other ranges (ZeRO), rather than copies of this one.
        counter: the dict whose ``step`` counts the updates that the moments have seen, if they are counted: the
            parameter's own (torch), or its group's (Transformer Engine's and apex's fused Adam).
    """

    parameter: torch.Tensor
    start: int
    stop: int
    slots: dict[str, torch.Tensor]
    sharded: bool
    counter: dict = field(default_factory=dict)


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
        padded: see :class:`Piece`.
        tensor: the local parameter or buffer of the model that it belongs to.
        start: position of its first element in that tensor, flattened.
        replica: number of this copy: see :class:`Piece`.
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
