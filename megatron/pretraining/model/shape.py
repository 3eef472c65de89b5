"""Translates flags into the plain numbers that define a model's operators."""

from __future__ import annotations

from megatron.pretraining.config import MoeFlags, NetworkFlags
from moc.state.shape import ModelShape


def model_shape(network: NetworkFlags, moe: MoeFlags, vocab_size: int) -> ModelShape:
    """The shape of the model that these flags describe; ``vocab_size`` includes padding."""
    return ModelShape(
        expert_layers=moe.expert_layers(network.num_layers),
        hidden_size=network.hidden_size,
        ffn_hidden_size=network.ffn_hidden_size,
        query_width=network.num_attention_heads * network.kv_channels,
        key_width=network.num_query_groups * network.kv_channels,
        head_width=network.kv_channels,
        vocab_size=vocab_size,
        positions=network.max_position_embeddings if network.position_embedding_type == "learned_absolute" else 0,
        num_experts=moe.num_experts or 0,
        expert_ffn_hidden_size=moe.moe_ffn_hidden_size or 0,
        shared_ffn_hidden_size=moe.moe_shared_expert_intermediate_size or 0,
        shared_gate=moe.moe_shared_expert_gate,
        gated=network.swiglu,
        linear_bias=network.add_bias_linear,
        qkv_bias=network.add_qkv_bias,
        norm_bias=network.normalization == "LayerNorm",
        qk_norm=network.qk_layernorm,
        qk_norm_full_width=network.qk_layernorm_full_width,
        tied=not network.untie_embeddings_and_output_weights,
    )
