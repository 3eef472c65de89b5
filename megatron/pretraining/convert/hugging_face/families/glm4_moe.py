"""Converts GLM-4-MoE (GLM-4.5, 2025): DeepSeek-V3's routing with grouped-query attention.

Scores are sigmoids, experts are selected by score and bias within the best groups, and shared experts have no gate.  A
model without shared experts receives one of an expert's width, with zero weights.
"""

from __future__ import annotations

from typing import Any

from megatron.pretraining.convert.hugging_face import configuration as common
from megatron.pretraining.convert.hugging_face.family import (
    Config,
    Described,
    Family,
    Model,
    check_options,
    described_model,
)
from moc.store.errors import CheckpointError

_NAME, _ARCHITECTURE, _EXPERTS = "glm4_moe", "Glm4MoeForCausalLM", "n_routed_experts"
_FIXED: dict[str, Any] = dict(moe_router_score_function="sigmoid", moe_shared_expert_gate=False)
_PER_GROUP = 2  # experts whose scores sum to a group's in transformers; topk // group_topk in megatron-core


def flags_of(config: Config) -> dict[str, Any]:
    """Returns the model in Megatron-LM's options; see :class:`Family`."""
    values = common.read_common_options(config, _EXPERTS, _FIXED, partial=0.5)
    width = common.required_integer(config, "moe_intermediate_size")
    factor = common.required_number(config, "routed_scaling_factor", 1.0)
    dense = common.required_integer(config, "first_k_dense_replace", 1, minimum=0)
    return (
        values
        | ({} if factor == 1 else dict(moe_router_topk_scaling_factor=factor))
        | _groups_of(config, values["moe_router_topk"])
        | dict(
            ffn_hidden_size=common.required_integer(config, "intermediate_size"),
            moe_ffn_hidden_size=width,
            moe_shared_expert_intermediate_size=width * common.required_integer(config, "n_shared_experts", 1),
            moe_layer_freq=common.layer_freq([int(layer >= dense) for layer in range(values["num_layers"])]),
            moe_router_enable_expert_bias=True,
            moe_router_dtype="fp32",
            qk_layernorm=common.read_switch(config, "use_qk_norm", False),
            add_qkv_bias=common.read_switch(config, "attention_bias", False),
        )
    )


def config_of(model: Model) -> dict[str, Any]:
    """Returns the configuration; see :class:`Family`."""
    described = described_model(model)
    check_options(_NAME, described, _FIXED)
    _check_groups(described)
    dense = described.expert_layers.index(1)
    if not all(described.expert_layers[dense:]):
        raise CheckpointError(
            f"{_NAME} cannot express --moe-layer-freq {list(described.expert_layers)}, only dense layers before all "
            "with experts. Fix: choose another --family",
            code="family-cannot-express",
        )
    width = described.moe_ffn_hidden_size or 1  # always set, since there are experts
    if described.shared % width:
        raise CheckpointError(
            f"{_NAME} cannot express --moe-shared-expert-intermediate-size {described.shared}, only a multiple of "
            f"--moe-ffn-hidden-size {width}. Fix: choose another --family",
            code="family-cannot-express",
        )
    return common.write(
        _NAME,
        _ARCHITECTURE,
        described,
        _EXPERTS,
        intermediate_size=described.ffn_hidden_size,
        moe_intermediate_size=width,
        n_shared_experts=shared_width(model) // width,
        first_k_dense_replace=dense,
        n_group=described.moe_router_num_groups or 1,
        topk_group=described.moe_router_group_topk or 1,
        norm_topk_prob=described.moe_router_topk > 1,
        routed_scaling_factor=described.moe_router_topk_scaling_factor or 1.0,
        use_qk_norm=described.qk_layernorm,
        attention_bias=described.add_qkv_bias,
        partial_rotary_factor=described.rotary_percent,
        num_nextn_predict_layers=0,
    )


def shared_width(model: Model) -> int:
    """Returns the inner width of the shared experts, which the family always has."""
    described = described_model(model)
    return described.shared or described.moe_ffn_hidden_size or 0


def _groups_of(config: Config, chosen: int) -> dict[str, Any]:
    groups, selected = common.required_integer(config, "n_group", 1), common.required_integer(config, "topk_group", 1)
    if common.read_switch(config, "norm_topk_prob", True) != (chosen > 1):
        raise common.unsupported(
            "norm_topk_prob",
            config.get("norm_topk_prob", True),
            "scores of several selected experts are always divided by their sum, and a single score never",
        )
    if groups == selected:  # no group is left out
        return {}
    if chosen // selected != _PER_GROUP:
        raise common.unsupported(
            "topk_group",
            selected,
            f"groups are compared by their {chosen} // {selected} best experts (num_experts_per_tok // topk_group), "
            f"and in transformers by their {_PER_GROUP} best",
        )
    return dict(moe_router_num_groups=groups, moe_router_group_topk=selected)


def _check_groups(described: Described) -> None:
    chosen, selected = described.moe_router_topk, described.moe_router_group_topk
    if selected and chosen // selected != _PER_GROUP:
        raise CheckpointError(
            f"{_NAME} compares groups by their {_PER_GROUP} best experts, and --moe-router-topk {chosen} with "
            f"--moe-router-group-topk {selected} by {chosen // selected}, as no family does. Fix: keep the checkpoint "
            "in torch_dist",
            code="family-cannot-express",
        )


FAMILY = Family(
    _NAME,
    _ARCHITECTURE,
    flags_of,
    config_of,
    shared="shared_experts",
    expert_bias=True,
    shared_width=shared_width,
)
