"""What a kind of model in transformers calls its tensors and settings.

A file in ``families`` has one :class:`Family` as ``FAMILY``.  A *model* here is a mapping from the fields of
``NetworkFlags`` and ``MoeFlags``, as flags, presets and checkpoints name them, to values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Model = Mapping[str, Any]
"""Values by the names of flags' fields, and ``vocab_size``, rows of the embedding without padding."""
Config = Mapping[str, Any]
"""What ``config.json`` has."""


def no_shared_experts(model: Model) -> int:
    """The inner width of shared experts in families that have none."""
    return 0


@dataclass(frozen=True)
class Family:
    """A kind of model in transformers.

    Attributes:
        name: its ``model_type``.
        architecture: the class in ``architectures``.
        flags_of: our model for a configuration; raises CheckpointError for what we cannot compute, naming the key.
        config_of: the configuration of our model; raises CheckpointError for what it cannot say, naming the flag.
        moe: the module with router and experts, within a layer.
        gate, up, down: an expert's matrices.
        shared: the module of shared experts within ``moe``; "" if the family has none.
        shared_gate: whether they have a gate of their own.
        expert_bias: whether the router has a bias for each expert; zeros if our model has none.
        shared_width: inner width of the shared experts that ``config_of`` declares for a model, 0 for none.  Where our
            model has no shared experts and this is not 0, all their tensors are zeros.
        ungated_down: where our shared experts have no gate and the family's do, ``down`` is our matrix times this, and
            the gate is zeros: the sigmoid of 0 is a half.
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
