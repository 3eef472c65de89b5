"""Converts OLMoE (Muennighoff et al., 2024): queries and keys are normalised over all heads together."""

from __future__ import annotations

from typing import Any

from megatron.pretraining.convert.hugging_face import configuration as common
from megatron.pretraining.convert.hugging_face.family import (
    FULL_WIDTH,
    SOFTMAX,
    Config,
    Family,
    Model,
    check_all_layers_have_experts,
    check_options,
    described_model,
)
from moc.store.errors import CheckpointError

_NAME, _ARCHITECTURE, _EXPERTS = "olmoe", "OlmoeForCausalLM", "num_experts"
_FIXED: dict[str, Any] = SOFTMAX | dict(
    add_qkv_bias=False,
    qk_layernorm=True,
    spec=FULL_WIDTH,
    rotary_percent=1.0,
    moe_shared_expert_intermediate_size=None,
)


def flags_of(config: Config) -> dict[str, Any]:
    """Returns the model in Megatron-LM's options; see :class:`Family`."""
    common.no_windows(config)
    common.require_only(config, "attention_bias", False, "biases of all attention layers are not supported")
    common.require_only(config, "clip_qkv", None, "clipping of queries, keys and values is not supported")
    width = common.required_integer(config, "intermediate_size")
    values = common.read_common_options(config, _EXPERTS, _FIXED)
    if values["kv_channels"] * values["num_attention_heads"] != values["hidden_size"]:
        raise common.unsupported("head_dim", values["kv_channels"], "heads of this family make up hidden_size")
    values |= common.softmax_router(config, common.read_switch(config, "norm_topk_prob", False))
    return values | dict(ffn_hidden_size=width, moe_ffn_hidden_size=width)


def config_of(model: Model) -> dict[str, Any]:
    """Returns the configuration; see :class:`Family`."""
    described = described_model(model)
    check_options(_NAME, described, _FIXED)
    check_all_layers_have_experts(_NAME, described)
    if described.kv_channels * described.num_attention_heads != described.hidden_size:
        raise CheckpointError(
            f"{_NAME} cannot express --kv-channels {described.kv_channels}, only --hidden-size / "
            "--num-attention-heads. Fix: choose another --family",
            code="family-cannot-express",
        )
    return common.write(
        _NAME,
        _ARCHITECTURE,
        described,
        _EXPERTS,
        intermediate_size=described.moe_ffn_hidden_size,
        norm_topk_prob=not described.moe_router_pre_softmax,
        router_aux_loss_coef=described.aux_loss_coeff,
        attention_bias=False,
        clip_qkv=None,
    )


FAMILY = Family(_NAME, _ARCHITECTURE, flags_of, config_of)
