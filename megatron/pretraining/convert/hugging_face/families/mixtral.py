"""Converts Mixtral (Jiang et al., 2024): experts in every layer, weighted by the softmax over the selected ones."""

from __future__ import annotations

from typing import Any

from megatron.pretraining.convert.hugging_face import configuration as common
from megatron.pretraining.convert.hugging_face.family import (
    SOFTMAX,
    Config,
    Family,
    Model,
    check_all_layers_have_experts,
    check_options,
    described_model,
)

_NAME, _ARCHITECTURE, _EXPERTS = "mixtral", "MixtralForCausalLM", "num_local_experts"
_FIXED: dict[str, Any] = SOFTMAX | dict(
    add_qkv_bias=False,
    qk_layernorm=False,
    rotary_percent=1.0,
    moe_router_pre_softmax=False,
    moe_shared_expert_intermediate_size=None,
)


def flags_of(config: Config) -> dict[str, Any]:
    """Returns the model in Megatron-LM's options; see :class:`Family`."""
    common.no_windows(config)
    width = common.required_integer(config, "intermediate_size")
    values = common.read_common_options(config, _EXPERTS, _FIXED, theta=1e6)
    return values | common.softmax_router(config, True) | dict(ffn_hidden_size=width, moe_ffn_hidden_size=width)


def config_of(model: Model) -> dict[str, Any]:
    """Returns the configuration; see :class:`Family`."""
    described = described_model(model)
    check_options(_NAME, described, _FIXED)
    check_all_layers_have_experts(_NAME, described)
    return common.write(
        _NAME,
        _ARCHITECTURE,
        described,
        _EXPERTS,
        intermediate_size=described.moe_ffn_hidden_size,
        router_aux_loss_coef=described.aux_loss_coeff,
        sliding_window=None,
    )


FAMILY = Family(_NAME, _ARCHITECTURE, flags_of, config_of, moe="block_sparse_moe", gate="w1", up="w3", down="w2")
