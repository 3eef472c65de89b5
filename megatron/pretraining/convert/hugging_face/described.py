"""A model of ours, checked against what a family in transformers can say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.pretraining.config import ConfigError, MoeFlags, NetworkFlags
from megatron.pretraining.config.convert import convert
from megatron.pretraining.config.flag import Flag, flags_of
from megatron.pretraining.convert.hugging_face.family import Model
from moc.errors import cause_of
from moc.store.errors import CheckpointError

LLAMA_LIKE: dict[str, Any] = dict(
    normalization="RMSNorm",
    swiglu=True,
    squared_relu=False,
    add_bias_linear=False,
    position_embedding_type="rope",
    rotary_interleaved=False,
    moe_expert_capacity_factor=None,
)
"""What all families have in common, by field."""
SOFTMAX: dict[str, Any] = dict(
    moe_router_score_function="softmax", moe_router_topk_scaling_factor=None, moe_router_num_groups=None
)
"""What families with a softmax router have in common."""


@dataclass(frozen=True)
class Described:
    """A model of ours, with every field, derived; what has no effect is left out.

    Attributes:
        vocab_size: rows of the embedding without padding.
        expert_layers: one entry per layer: 1 with experts, 0 dense.
    """

    network: NetworkFlags
    moe: MoeFlags
    vocab_size: int
    expert_layers: tuple[int, ...]

    @property
    def shared(self) -> int:
        """Inner width of the shared experts, 0 without."""
        return self.moe.moe_shared_expert_intermediate_size or 0

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.network.kv_channels


def described(model: Model) -> Described:
    """Reads a model, whose values may be as JSON has them.

    Raises:
        CheckpointError: values are missing or contradict each other.
    """
    given = {name: value for name, value in model.items() if value is not None}
    try:
        network = NetworkFlags(**_derived(_values(NetworkFlags, given)))
        moe = MoeFlags(**_routed(_values(MoeFlags, given), network.ffn_hidden_size))
    except ConfigError as error:
        raise CheckpointError(
            f"the model that the checkpoint describes is none: {cause_of(error)}. Fix: correct its "
            "description, or convert another checkpoint",
            code="model-description-invalid",
        ) from None
    for name in ("vocab_size", "ffn_hidden_size", "max_position_embeddings"):
        if name not in given:
            raise CheckpointError(
                f"the model that the checkpoint describes has no {name}. Fix: add it to the description, or convert "
                "another checkpoint",
                code="model-description-invalid",
            )
    layers = moe.expert_layers(network.num_layers)
    if len(layers) != network.num_layers:
        raise CheckpointError(
            f"the model has {network.num_layers} layers, and its moe_layer_freq lists {len(layers)}. Fix: correct "
            "--moe-layer-freq, or convert another checkpoint",
            code="model-description-invalid",
        )
    return Described(network, moe, int(given["vocab_size"]), layers)


def check(name: str, model: Described, fixed: dict[str, Any]) -> None:
    """Raises CheckpointError unless the model's fields have the values that all models of a family have."""
    flags = {flag.name: flag for group in (NetworkFlags, MoeFlags) for flag in flags_of(group)}
    _refuse(not any(model.expert_layers), f"{name} has experts, and a model without --num-experts has none")
    for field, wanted in (LLAMA_LIKE | fixed).items():
        there = getattr(model.network if hasattr(model.network, field) else model.moe, field)
        _refuse(there != wanted, f"{name} cannot express {_spelled(flags[field], there, wanted)}")
    _refuse(
        model.moe.moe_router_load_balancing_type == "sinkhorn",
        f"{name} cannot express --moe-router-load-balancing-type sinkhorn, which chooses experts in another way",
    )


def check_all_layers_have_experts(name: str, model: Described) -> None:
    """Raises CheckpointError if a layer is dense."""
    _refuse(not all(model.expert_layers), f"{name} has experts in every layer: --moe-layer-freq must be 1")


def _refuse(wrong: object, sentence: str) -> None:
    if wrong:
        raise CheckpointError(f"{sentence}. Fix: choose another --family", code="family-cannot-express")


def _spelled(flag: Flag, there: object, wanted: object) -> str:
    if isinstance(there, bool):
        return f"a model {'with' if there else 'without'} {flag.on[0]}"
    return f"{flag.on[0]} {there}{'' if wanted is None else f', only {wanted}'}"


def _values(group: type, given: Mapping[str, Any]) -> dict[str, Any]:
    known = flags_of(group)
    return {flag.name: convert(flag, given[flag.name]) if flag.name in given else flag.default for flag in known}


def _derived(values: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if values["kv_channels"] is None and hidden and heads and hidden % heads == 0:
        values["kv_channels"] = hidden // heads
    if not values["group_query_attention"] and values["num_query_groups"] is None:
        values["num_query_groups"] = heads
    return values


def _routed(values: dict[str, Any], width: int) -> dict[str, Any]:
    """Fills in the width of experts; drops what has no effect: a factor of one, and groups that all are selected."""
    if values["num_experts"] is not None and values["moe_ffn_hidden_size"] is None:
        values["moe_ffn_hidden_size"] = width
    if values["moe_router_topk_scaling_factor"] == 1:
        values["moe_router_topk_scaling_factor"] = None
    if values["moe_router_num_groups"] == values["moe_router_group_topk"]:
        values["moe_router_num_groups"] = values["moe_router_group_topk"] = None
    return values
