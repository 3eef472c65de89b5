"""Converts Qwen3-MoE (Yang et al., 2025): queries and keys of each head are normalised, any layers may be dense."""

from __future__ import annotations

from typing import Any

from megatron.pretraining.convert.hugging_face import configuration as common
from megatron.pretraining.convert.hugging_face.family import (
    SOFTMAX,
    Config,
    Family,
    Model,
    check_options,
    described_model,
)

_NAME, _ARCHITECTURE, _EXPERTS = "qwen3_moe", "Qwen3MoeForCausalLM", "num_experts"
_FIXED: dict[str, Any] = SOFTMAX | dict(
    add_qkv_bias=False,
    qk_layernorm=True,
    rotary_percent=1.0,
    moe_shared_expert_intermediate_size=None,
)


def flags_of(config: Config) -> dict[str, Any]:
    """Returns the model in Megatron-LM's options; see :class:`Family`."""
    common.no_windows(config, "use_sliding_window")
    common.require_only(config, "attention_bias", False, "biases of all attention layers are not supported")
    return (
        common.read_common_options(config, _EXPERTS, _FIXED)
        | common.softmax_router(config, common.read_switch(config, "norm_topk_prob", False))
        | common.dense_and_sparse(config)
    )


def config_of(model: Model) -> dict[str, Any]:
    """Returns the configuration; see :class:`Family`."""
    described = described_model(model)
    check_options(_NAME, described, _FIXED)
    own = dict(attention_bias=False, use_sliding_window=False) | common.sparse_keys(described)
    return common.write(_NAME, _ARCHITECTURE, described, _EXPERTS, **own)


FAMILY = Family(_NAME, _ARCHITECTURE, flags_of, config_of)
