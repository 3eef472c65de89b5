"""Size and shape of the transformer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import REQUIRED, FlagGroup, flag


@dataclass(frozen=True)
class NetworkFlags(FlagGroup):
    """Network size: the transformer without its experts."""

    preset = True

    num_layers: int = flag(REQUIRED, "Transformer layers.", limits=">= 1, <= 10000")
    hidden_size: int = flag(REQUIRED, "Width of the residual stream.", limits=">= 1")
    ffn_hidden_size: int = flag(
        None,
        "Inner width of dense feed-forward layers; by default 4 times --hidden-size, or with --swiglu two thirds of "
        "that, rounded down to a multiple of 64.",
        limits=">= 1",
    )
    num_attention_heads: int = flag(REQUIRED, "Attention heads.", limits=">= 1")
    kv_channels: int = flag(
        None, "Width of one attention head; by default --hidden-size / --num-attention-heads.", limits=">= 1"
    )
    group_query_attention: bool = flag(False, "Let several attention heads share keys and values.")
    num_query_groups: int = flag(
        None,
        "Heads of keys and values; by default 1 with --group-query-attention, else --num-attention-heads.",
        limits=">= 1",
    )
    max_position_embeddings: int = flag(None, "Longest sequence, in tokens; by default --seq-length.", limits=">= 1")
    position_embedding_type: str = flag(
        "learned_absolute", "Position embedding.", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = flag(10000, "Base of the rotary frequencies.", limits=">= 1")
    rotary_percent: float = flag(1.0, "Share of each head that is rotated.", limits="> 0, <= 1")
    rotary_interleaved: bool = flag(False, "Rotate neighbouring channels instead of the two halves of a head.")
    make_vocab_size_divisible_by: int = flag(
        128, "The vocabulary is padded to a multiple of this times --tensor-model-parallel-size.", limits=">= 1"
    )
    normalization: str = flag("LayerNorm", "Normalization layers.", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(
        1e-5, "Term added to the variance in normalization layers.", "--layernorm-epsilon", limits="> 0"
    )
    swiglu: bool = flag(False, "Gated SiLU instead of GELU in feed-forward layers and experts.")
    squared_relu: bool = flag(False, "Squared ReLU instead of GELU in feed-forward layers and experts.")
    untie_embeddings_and_output_weights: bool = flag(
        False, "Do not share the embedding's weights with the output layer."
    )
    add_bias_linear: bool = flag(True, "Biases in linear layers.", "--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "Bias in the query, key and value projections, even with --disable-bias-linear.")
    qk_layernorm: bool = flag(False, "Normalize queries and keys.")
    qk_layernorm_full_width: bool = flag(
        False,
        "Normalize queries and keys over all heads together, not each head by itself; needs --qk-layernorm, and "
        "--tensor-model-parallel-size 1.",
    )
    transformer_impl: str = flag(
        None,
        "Implementation of the layers: Transformer Engine's (default if installed), or megatron-core's own (local).",
        choices=("local", "transformer_engine"),
    )
    attention_backend: str = flag(
        "auto", "Attention kernel of Transformer Engine.", choices=("auto", "flash", "fused", "unfused", "local")
    )
