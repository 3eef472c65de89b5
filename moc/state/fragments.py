"""Fragments (tensor chunks): the state on this rank, cut into boxes of the unpartitioned model.

For each local tensor, an engine provides the boxes of the unpartitioned model that it holds (:class:`Piece`), and the
range whose optimizer state this rank owns (:class:`OwnedSlice`); :func:`fragments_of` intersects the two.  ZeRO's shard
boundaries and tensor and expert slices are resolved here; no other module handles a flat buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from moc.state.operators import operator_of
from moc.state.region import Region, boxes_of_range


@dataclass(frozen=True)
class Piece:
    """A contiguous chunk of a local parameter, and its bounds in the unpartitioned model.

    Attributes:
        name: name of the tensor in the unpartitioned model, with global layer and expert numbers.
        global_shape: shape of that tensor.
        region: box of that tensor held by ``view``.
        view: local values, sharing memory with the parameter.
        start: index of the first element of ``view`` in the flattened local parameter.
        replica: index of this copy, (stage, tensor-parallel rank, data-parallel rank); all zeros for the first copy.
        padded: the global shape depends on the layout (vocabulary padded for tensor parallelism); elements beyond the
            smaller of two such shapes are padding.
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
        parameter: model parameter, or a buffer saved like one.
        slots: live 1-D tensors of ``stop - start`` elements by slot name (``master``, ``exp_avg``, ``exp_avg_sq``), in
            the formats set by flags; writing into them restores the optimizer.
        sharded: data-parallel peers own other ranges (ZeRO) rather than copies of this one.
        counter: dict whose ``step`` counts the updates of the moments, if counted: the parameter's own (torch), or its
            group's (fused Adam of Transformer Engine and apex).
        copy: index of this rank among the ranks that hold the same range although it is sharded; 0 for the first.
    """

    parameter: torch.Tensor
    start: int
    stop: int
    slots: dict[str, torch.Tensor]
    sharded: bool
    counter: dict = field(default_factory=dict)
    copy: int = 0


@dataclass(frozen=True, eq=False)
class Fragment:
    """A box of one slot of one tensor of the unpartitioned model, and the live memory that holds it on this rank.

    Attributes:
        slot: ``master``, ``exp_avg``, ``exp_avg_sq`` (Adam) or ``momentum_buffer`` (SGD), in the formats set by flags;
            ``param``, the compute weights; ``grad``, the gradient.
        view: contiguous live values, ``region.numel`` of them.
        first_copy: no other rank holds this fragment with a smaller replica index.
        padded: see :class:`Piece`.
        tensor: local parameter or buffer of the model.
        start: index of the first element in the flattened ``tensor``.
        replica: index of this copy: see :class:`Piece`.
        sharded: data-parallel peers hold other ranges (ZeRO) rather than copies of this one.
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
        """The operator of the tensor; raises ``ValueError`` if there is none."""
        return operator_of(self.name)


def fragments_of(owned: OwnedSlice, pieces: list[Piece]) -> Iterator[Fragment]:
    """Cuts a range of a local tensor into boxes of the unpartitioned model, and yields one fragment per slot."""
    for piece in pieces:
        start = max(owned.start, piece.start)
        stop = min(owned.stop, piece.start + piece.region.numel)
        copy = (*piece.replica[:-1], owned.copy) if owned.sharded else piece.replica
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
