"""Defines layers that normalize the queries, and the keys, of all heads of a token together, as in OLMoE.

See Muennighoff et al., 2024, section 4.2.5.  Megatron-LM builds them with
``--qk-layernorm --spec megatron.pretraining.model.full_width layer_spec``.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.pretraining.config.flag import refuse


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Returns Megatron-LM's specification of a model's layers, with these norms.

    Args:
        config: Megatron-LM's configuration of a GPT model.
        vp_stage: virtual pipeline stage.

    Raises:
        ConfigError: heads of a token are on several workers.
    """
    from megatron.training.models.gpt import default_layer_spec

    core = config.transformer
    refuse(
        core.tensor_model_parallel_size > 1,
        "--spec megatron.pretraining.model.full_width normalizes all heads of a token together, which "
        f"--tensor-model-parallel-size {core.tensor_model_parallel_size} distributes. Fix: set it to 1",
        code="flags-exclude-each-other",
    )
    spec: Any = default_layer_spec(config, vp_stage if vp_stage is not None else 0)
    normalize_full_width(spec.layer_specs if hasattr(spec, "layer_specs") else [spec], core)
    return spec


def normalize_full_width(layers: Any, config: TransformerConfig) -> None:
    """Changes the norms of queries and keys in specifications of layers."""
    heads = config.num_attention_heads, config.num_query_groups or config.num_attention_heads
    for layer in layers:
        parts = layer.submodules.self_attention.submodules
        parts.q_layernorm, parts.k_layernorm = (ModuleSpec(FullWidthNorm, params=dict(heads=count)) for count in heads)


class FullWidthNorm:
    """Builds a norm of all heads of a token together."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, heads: int, eps: float = 1e-5, **ignored):
        """Returns the torch module, for tensors of shape [token, sample, head, channel of it]."""
        kinds = {"LayerNorm": _FullWidthLayerNorm, "RMSNorm": _FullWidthRMSNorm}
        norm = kinds[config.normalization](heads * hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in norm.parameters():
            marked: Any = parameter
            marked.sequence_parallel = config.sequence_parallel
        return norm


class _FullWidthLayerNorm(torch.nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.flatten(-2)).view(input.shape)


class _FullWidthRMSNorm(torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(-2)).view(x.shape)
