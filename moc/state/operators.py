"""Operators: the units of a model that are saved, frozen and replayed, and the state that a snapshot has of each."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import Enum
from typing import Annotated

import msgspec

from moc.errors import UserError


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
    def place(self) -> tuple[int, int] | None:
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
        if found := pattern.fullmatch(parameter_name):
            return re.sub("[NE]", lambda number: found[number[0]], operator)
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


DetailName = Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(one.value for one in Detail)})\Z")]
"""The value of a :class:`Detail`."""
