"""Describes a family of models in transformers: the names of its tensors and settings.

A file in ``families`` has one :class:`Family` as ``FAMILY``.  A *model* here is a mapping to values from the fields of
``NetworkFlags`` and ``MoeFlags``, as flags, presets and checkpoints name them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Model = Mapping[str, Any]
"""Values by the names of flags' fields, and ``vocab_size``, rows of the embedding without padding."""
Config = Mapping[str, Any]
"""Contents of ``config.json``."""


def no_shared_experts(model: Model) -> int:
    """Returns the inner width of shared experts in families without shared experts: 0."""
    return 0


@dataclass(frozen=True)
class Family:
    """Family of models in transformers.

    Attributes:
        name: its ``model_type``.
        architecture: the class in ``architectures``.
        flags_of: converts a configuration to a model; raises CheckpointError with the key if it is unsupported.
        config_of: converts a model to a configuration; raises CheckpointError with the flag if it is unsupported.
        moe: the module with router and experts, within a layer.
        gate, up, down: an expert's matrices.
        shared: the module of shared experts within ``moe``; "" if the family has none.
        shared_gate: whether shared experts have a gate.
        expert_bias: whether the router has a bias for each expert; zeros if the model has none.
        shared_width: inner width of the shared experts that ``config_of`` declares for a model, 0 for none.  If the
            model has no shared experts and this is not 0, all their tensors are zeros.
        ungated_down: factor for a model without a gate of shared experts, in a family with one.  ``down`` is the
            model's matrix times this factor, and the gate is zeros: the sigmoid of 0 is a half.
    """

    name: str
    architecture: str
    flags_of: Callable[[Config], dict[str, Any]]
    config_of: Callable[[Model], dict[str, Any]]
    moe: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""
    shared_gate: bool = False
    expert_bias: bool = False
    shared_width: Callable[[Model], int] = no_shared_experts
    ungated_down: float = 1.0
