"""Operators: the parts of a model that are saved, frozen and replayed as a whole."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


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
        unsliced: number of those that tensor parallelism replicates rather than slices: norms, the router, learned
            positions, biases added after the sum over slices.
    """

    name: str
    kind: str
    layer: int | None
    expert: int | None
    parameters: int
    unsliced: int = 0

    @property
    def place(self) -> tuple[int, int] | None:
        """Layer and number of an expert; None for any other operator."""
        return None if self.layer is None or self.expert is None else (self.layer, self.expert)


_OUTSIDE = (
    (re.compile(r"embedding\..+"), "embedding"),
    (re.compile(r"decoder\.final_layernorm\..+"), "output"),
    (re.compile(r"output_layer\..+"), "output"),
)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_INSIDE = (
    (re.compile(r"(?:input_layernorm|self_attention)\..+"), "attention"),
    (re.compile(r"mlp\.router\..+"), "router"),
    (re.compile(r"mlp\.experts\.experts\.(\d+)\..+"), "expert"),
    # pre_mlp_layernorm belongs to dense layers, but megatron-core's local layers use the name with experts too.
    (re.compile(r"(?:pre_mlp_layernorm|mlp\.linear_fc[12]|mlp\.shared_experts)\..+"), "mlp"),
)


@functools.cache
def operator_of(parameter_name: str) -> str:
    """The operator name of a parameter.

    A norm belongs to the operator that it feeds, the final norm to ``output``.  The norm before a router and its
    experts feeds all of them and belongs to ``layers.N.mlp``, which without shared experts holds nothing else.  A
    weight shared by embedding and output belongs to ``embedding``.

    Args:
        parameter_name: name in the unpartitioned model, from ``megatron.pretraining.model.parameters``.

    Raises:
        ValueError: the name matches no operator.
    """
    for pattern, name in _OUTSIDE:
        if pattern.fullmatch(parameter_name):
            return name
    if layer := _LAYER.fullmatch(parameter_name):
        for pattern, kind in _INSIDE:
            if inside := pattern.fullmatch(layer[2]):
                return ".".join(["layers", layer[1], kind, *inside.groups()])
    raise ValueError(f"the parameter {parameter_name} belongs to no operator that is known")
