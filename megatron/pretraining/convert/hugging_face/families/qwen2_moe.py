"""Converts Qwen2-MoE (Yang et al., 2024): any layers may be dense, and shared experts have a gate.

Shared experts without a gate become experts with a zero gate, whose sigmoid is a half, and a doubled last matrix.  A
model without shared experts receives some of width 1 with zero weights.
"""

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

_NAME, _ARCHITECTURE, _EXPERTS = "qwen2_moe", "Qwen2MoeForCausalLM", "num_experts"
_FIXED: dict[str, Any] = SOFTMAX | dict(qk_layernorm=False, rotary_percent=1.0)


def flags_of(config: Config) -> dict[str, Any]:
    """Returns the model in Megatron-LM's options; see :class:`Family`."""
    common.no_windows(config, "use_sliding_window")
    return (
        common.read_common_options(config, _EXPERTS, _FIXED)
        | common.softmax_router(config, common.read_switch(config, "norm_topk_prob", False))
        | common.dense_and_sparse(config)
        | dict(
            add_qkv_bias=common.read_switch(config, "qkv_bias", True),
            moe_shared_expert_intermediate_size=common.required_integer(config, "shared_expert_intermediate_size"),
            moe_shared_expert_gate=True,
        )
    )


def config_of(model: Model) -> dict[str, Any]:
    """Returns the configuration; see :class:`Family`."""
    described = described_model(model)
    check_options(_NAME, described, _FIXED)
    return common.write(
        _NAME,
        _ARCHITECTURE,
        described,
        _EXPERTS,
        qkv_bias=described.add_qkv_bias,
        shared_expert_intermediate_size=shared_width(model),
        use_sliding_window=False,
        **common.sparse_keys(described),
    )


def shared_width(model: Model) -> int:
    """Returns the inner width of the shared experts, which the family always has."""
    return model.get("moe_shared_expert_intermediate_size") or 1


FAMILY = Family(
    _NAME,
    _ARCHITECTURE,
    flags_of,
    config_of,
    shared="shared_expert",
    shared_gate=True,
    shared_width=shared_width,
    ungated_down=2.0,
)
