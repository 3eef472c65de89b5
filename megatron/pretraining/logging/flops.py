"""Computes the model FLOPs of an iteration."""

from __future__ import annotations

from megatron.pretraining.config import Config


def flops_per_sample(config: Config, vocab_size: int) -> float:
    """Counts the floating-point operations of forward and backward of one sample, without recomputation.

    A multiply-add is two operations and backward is twice forward, so each weight costs six operations per token.
    Causal attention costs half of the full score matrix.
    """
    network, seq = config.network, config.data.seq_length
    queries = network.kv_channels * network.num_attention_heads
    groups = network.num_query_groups if network.group_query_attention else network.num_attention_heads
    attention = network.hidden_size * (2 * queries + 2 * network.kv_channels * groups)
    scores = queries * seq  # query x key and probability x value, each half masked
    gate = 3 if network.swiglu else 2
    dense_layers = network.num_layers - moe_layers(config)
    weights = (
        network.num_layers * (attention + scores)
        + dense_layers * gate * network.hidden_size * network.ffn_hidden_size
        + moe_layers(config) * _expert_weights(config, gate)
        + network.hidden_size * vocab_size
    )
    return 6.0 * seq * weights


def expert_share(config: Config, vocab_size: int) -> float:
    """Returns the share of :func:`flops_per_sample` in routed experts, 0 to 1."""
    moe, gate = config.moe, 3 if config.network.swiglu else 2
    width = (moe.moe_ffn_hidden_size or config.network.ffn_hidden_size) * moe.moe_router_topk
    routed = moe_layers(config) * gate * config.network.hidden_size * width
    return 6.0 * config.data.seq_length * routed / flops_per_sample(config, vocab_size)


def _expert_weights(config: Config, gate: int) -> int:
    moe, hidden = config.moe, config.network.hidden_size
    if moe.num_experts is None:
        return 0
    expert = moe.moe_ffn_hidden_size or config.network.ffn_hidden_size
    shared = moe.moe_shared_expert_intermediate_size or 0
    gates = moe.num_experts + moe.moe_shared_expert_gate
    return hidden * (gate * (moe.moe_router_topk * expert + shared) + gates)


def moe_layers(config: Config) -> int:
    """Returns the number of layers with experts."""
    return sum(config.moe.expert_layers(config.network.num_layers))
