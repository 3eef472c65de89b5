"""Operators, the units of a model that are saved, frozen and replayed, and the chunks of their tensors.

An engine provides, for each local tensor, the boxes of the unpartitioned model that it holds (:class:`Piece`), and the
range whose optimizer state this rank owns (:class:`OwnedSlice`); :func:`fragments_of` intersects the two. Tensor,
expert and pipeline parallelism cut a parameter into boxes; ZeRO cuts the flattened box at any element. Both become
:class:`Region`, so no other module handles a flat buffer or the boundary of a shard.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import msgspec

from moc.errors import UserError

if TYPE_CHECKING:
    import torch


class UnsupportedStateError(UserError, ValueError):
    """A model or optimizer cannot be saved; the message names the parameter or the optimizer."""


@dataclass(frozen=True)
class Operator:
    """One part of the unpartitioned model.

    Attributes:
        name: ``embedding``, ``layers.N.attention``, ``layers.N.mlp`` (dense or shared expert), ``layers.N.router``,
            ``layers.N.expert.E`` or ``output``; global numbers, from 0.
        kind: ``embedding``, ``attention``, ``mlp``, ``router``, ``expert`` or ``output``.
        layer: global layer number; None outside of the layers.
        expert: expert number in the layer; None unless it is an expert.
        parameters: number of parameters in the unpartitioned model.
        unsliced: number of parameters that tensor parallelism replicates rather than slices: norms, the router,
            learned positions, biases added after the sum over slices.
        moments: elements of each moment, by slot, if a job has several kinds of optimizers (Muon and Adam); None if
            every moment has all parameters.
    """

    name: str
    kind: str
    layer: int | None
    expert: int | None
    parameters: int
    unsliced: int = 0
    moments: tuple[tuple[str, int], ...] | None = None

    def elements(self, slot: str) -> int:
        """Returns the number of elements of a slot in the unpartitioned model."""
        if self.moments is None or slot in ("master", "param", "grad"):
            return self.parameters
        return dict(self.moments).get(slot, 0)

    @property
    def expert_id(self) -> tuple[int, int] | None:
        """Layer and number of an expert; None for any other operator."""
        return None if self.layer is None or self.expert is None else (self.layer, self.expert)


OPERATORS = {
    "embedding.*": "embedding",
    "decoder.layers.N.input_layernorm.*": "layers.N.attention",
    "decoder.layers.N.self_attention.*": "layers.N.attention",
    "decoder.layers.N.mlp.router.*": "layers.N.router",
    "decoder.layers.N.mlp.experts.experts.E.*": "layers.N.expert.E",
    # belongs to dense layers, but megatron-core's local layers use the name with experts too
    "decoder.layers.N.pre_mlp_layernorm.*": "layers.N.mlp",
    "decoder.layers.N.mlp.linear_fc1.*": "layers.N.mlp",
    "decoder.layers.N.mlp.linear_fc2.*": "layers.N.mlp",
    "decoder.layers.N.mlp.shared_experts.*": "layers.N.mlp",
    "decoder.final_layernorm.*": "output",
    "output_layer.*": "output",
}
"""Operators by the names of their parameters; N and E are numbers of layer and expert, * any text."""

NAMED = "::"
"""Separates the operator from the name of a tensor of a model with other names: ``layers.N.expert.E::blocks.0.w1``."""

MODULE_STATE = "module_state."
"""Prefix of the names of user modules' state: ``module_state.OPERATOR.INDEX``, with a worker's index in its stage."""
SHARED_BUFFERS = ("expert_bias", "qb_beta")
"""Buffers of megatron-core's routers that are equal on all data-parallel ranks and change with an update."""


def is_module_state(name: str) -> bool:
    """Returns whether a tensor is module state without optimizer: a router's biases, or values of user modules."""
    return name.startswith(MODULE_STATE) or name.endswith(tuple(f"router.{buffer}" for buffer in SHARED_BUFFERS))


def _pattern(names: str) -> re.Pattern[str]:
    escaped = re.escape(names).replace(r"\*", ".+")
    return re.compile(re.sub(r"\\\.([NE])\\\.", r"\\.(?P<\1>\\d+)\\.", escaped))


_PATTERNS = {
    _pattern(names): operator
    for operator in OPERATORS.values()
    for names in (*(n for n, o in OPERATORS.items() if o == operator), f"{MODULE_STATE}{operator}.*")
}


_OPERATOR = re.compile(
    "|".join(re.escape(name).replace("N", r"\d+").replace("E", r"\d+") for name in OPERATORS.values())
)


def is_operator(name: str) -> bool:
    """Returns whether a name is the name of an operator."""
    return _OPERATOR.fullmatch(name) is not None


def is_known(parameter_name: str) -> bool:
    """Returns whether a parameter of this name belongs to an operator."""
    return any(pattern.fullmatch(parameter_name) for pattern in _PATTERNS)


@functools.cache
def operator_of(parameter_name: str) -> str:
    """Returns the operator name of a parameter.

    A norm belongs to the operator that it feeds, the final norm to ``output``.  The norm before a router and its
    experts feeds all of them and belongs to ``layers.N.mlp``; without shared experts, that operator holds only this
    norm.  A weight shared by embedding and output belongs to ``embedding``.

    Args:
        parameter_name: name in the unpartitioned model, from ``megatron.pretraining.model.parameters``, or the name of
            an operator, ``::`` and any name.

    Raises:
        UnsupportedStateError: the name matches no operator.
    """
    operator, separator, _ = parameter_name.partition(NAMED)
    if separator and is_operator(operator):
        return operator
    for pattern, operator in _PATTERNS.items():
        if match := pattern.fullmatch(parameter_name):
            return re.sub("[NE]", lambda number: match[number[0]], operator)
    raise UnsupportedStateError(
        f"the parameter {parameter_name} belongs to no known operator. Fix: give it one of the names "
        f"{', '.join(OPERATORS)}",
        code="parameter-unknown",
    )


class Detail(Enum):
    """Subset of an operator's state that is saved."""

    FULL = "full"
    """Master weights and moments (fp32 or as set by flags; with ZeRO-1 the slices of this rank), from which the compute
    weights follow; and router biases, which no optimizer owns, as slot ``param`` (fp32; with ZeRO-1
    the first data-parallel rank's copy stands for all)."""

    MASTER = "master"
    """The master weights of ``FULL`` and the router biases, without moments."""

    MOMENTS = "moments"
    """The moments of ``FULL``: ``MASTER`` and ``MOMENTS`` are disjoint and together make ``FULL``."""

    COMPUTE = "compute"
    """Slot ``param``: the weights that the model computes with, in its dtype, and the router biases.  With ZeRO-1, only
    the weights whose masters this rank owns, although every data-parallel rank holds all weights."""

    GRAD = "grad"
    """Slot ``grad``: the reduced gradients, in the dtype of their reduction, still multiplied by fp16's loss scale.
    With ZeRO-1, only the slices of this rank: megatron-core leaves the other gradients unreduced."""

    def holds(self, slot: str) -> bool:
        """Returns whether this subset includes a slot of an operator's parameters or of a router's biases."""
        if self is Detail.FULL:
            return slot != "grad"
        if self is Detail.MOMENTS:
            return slot not in ("master", "param", "grad")
        return slot in {Detail.MASTER: ("master", "param"), Detail.COMPUTE: ("param",), Detail.GRAD: ("grad",)}[self]


DetailName = Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(detail.value for detail in Detail)})\Z")]
"""The value of a :class:`Detail`."""


@dataclass(frozen=True)
class Region:
    """An axis-aligned box of ``shape`` elements starting at ``offset``, in elements of each axis."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    def slices(self, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """Returns the index of this box in a tensor whose first element is at ``origin`` (default: zero)."""
        origin = origin or (0,) * len(self.offset)
        return tuple(slice(o - p, o - p + n) for o, p, n in zip(self.offset, origin, self.shape, strict=True))

    def intersect(self, other: Region) -> Region | None:
        """Returns the intersection, or None if it is empty."""
        start = tuple(map(max, self.offset, other.offset))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Region(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def without(self, part: Region) -> Iterator[Region]:
        """Yields disjoint boxes that cover this one except ``part``."""
        offset, shape = self.offset, self.shape
        for axis, (start, count) in enumerate(zip(part.offset, part.shape, strict=True)):
            stop, end = start + count, offset[axis] + shape[axis]
            for lower, upper in ((offset[axis], start), (stop, end)):
                if lower < upper:
                    yield Region(_with(offset, axis, lower), _with(shape, axis, upper - lower))
            offset, shape = _with(offset, axis, start), _with(shape, axis, count)

    def cut(self, max_elements: int) -> Iterator[Region]:
        """Yields boxes of at most ``max_elements`` elements (at least one) that cover this one in element order."""
        if self.numel <= max_elements:
            yield self
            return
        axis = next(axis for axis, count in enumerate(self.shape) if count > 1)
        start, count = self.offset[axis], self.shape[axis]
        step = max(1, max_elements * count // self.numel)
        for first in range(0, count, step):
            shape = _with(self.shape, axis, min(step, count - first))
            yield from Region(_with(self.offset, axis, start + first), shape).cut(max_elements)

    def shifted(self, by: tuple[int, ...]) -> Region:
        """Returns this box translated by ``by``."""
        return Region(tuple(map(sum, zip(self.offset, by, strict=True))), self.shape)


def _with(numbers: tuple[int, ...], axis: int, number: int) -> tuple[int, ...]:
    return (*numbers[:axis], number, *numbers[axis + 1 :])


def regions_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Region]]:
    """Cuts the range [start, stop) of a row-major flattened tensor into boxes of that tensor.

    Each box is contiguous in the flattened tensor.  There are at most ``2 * len(shape) - 1`` of them.

    Yields:
        (index of the box's first element in the flattened tensor, box), ascending.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield start, Region((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = math.prod(shape[1:])
    first_complete, last_complete = -(-start // row), stop // row
    if first_complete > last_complete:  # within one row
        yield from _in_row(shape, start // row, start, stop)
        return
    # nothing, if the range begins with a row
    yield from _in_row(shape, first_complete - 1, start, first_complete * row)
    if first_complete < last_complete:
        zeros = (0,) * (len(shape) - 1)
        yield first_complete * row, Region((first_complete, *zeros), (last_complete - first_complete, *shape[1:]))
    yield from _in_row(shape, last_complete, last_complete * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[tuple[int, Region]]:
    base = index * math.prod(shape[1:])
    for position, region in regions_of_range(shape[1:], start - base, stop - base):
        yield base + position, Region((index, *region.offset), (1, *region.shape))


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
        for position, region in regions_of_range(piece.region.shape, start - piece.start, stop - piece.start):
            position += piece.start
            for slot, values in owned.slots.items():
                yield Fragment(
                    name=piece.name,
                    slot=slot,
                    global_shape=piece.global_shape,
                    region=region.shifted(piece.region.offset),
                    view=values[position - owned.start : position - owned.start + region.numel],
                    first_copy=not any(copy),
                    padded=piece.padded,
                    tensor=owned.parameter,
                    start=position,
                    replica=piece.replica,
                    sharded=owned.sharded,
                )
