"""Size and shape of the transformer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag, refuse


@dataclass(frozen=True)
class NetworkFlags(FlagGroup):
    """Network size: the transformer without its experts."""

    preset = True

    num_layers: int = flag(None, "Transformer layers.", required=True, at_least=1)
    hidden_size: int = flag(None, "Width of the residual stream.", required=True, at_least=1)
    ffn_hidden_size: int = flag(
        None,
        "Inner width of the dense feed-forward layers; by default 4 times --hidden-size, or with --swiglu "
        "two "
        "thirds of that, rounded down to a multiple of 64.",
        at_least=1,
    )
    num_attention_heads: int = flag(None, "Attention heads.", required=True, at_least=1)
    kv_channels: int = flag(
        None, "Width of one attention head; by default --hidden-size / --num-attention-heads.", at_least=1
    )
    group_query_attention: bool = flag(False, "Let several attention heads share keys and values.")
    num_query_groups: int = flag(
        None,
        "Heads of keys and values with --group-query-attention, where 1 is the default; otherwise as many as "
        "--num-attention-heads.",
        at_least=1,
    )
    max_position_embeddings: int = flag(
        None, "Longest sequence that positions exist for; by default --seq-length.", at_least=1
    )
    position_embedding_type: str = flag(
        "learned_absolute", "How tokens learn their position.", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: int = flag(10000, "Base of the rotary frequencies.", at_least=1)
    rotary_percent: float = flag(1.0, "Share of each head that is rotated.", above=0, at_most=1)
    rotary_interleaved: bool = flag(False, "Rotate neighbouring channels in place of the two halves of a head.")
    make_vocab_size_divisible_by: int = flag(
        128, "The vocabulary is padded to a multiple of this times --tensor-model-parallel-size.", at_least=1
    )
    normalization: str = flag("LayerNorm", "Which norm.", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = flag(1e-5, "Keeps the norms from dividing by zero.", "--layernorm-epsilon", above=0)
    swiglu: bool = flag(False, "Gated SiLU units in the feed-forward layers and experts, in place of GELU.")
    squared_relu: bool = flag(False, "Squared ReLU in the feed-forward layers and experts, in place of GELU.")
    untie_embeddings_and_output_weights: bool = flag(
        False, "Give the output layer weights of its own, in place of the embedding's."
    )
    add_bias_linear: bool = flag(True, "Biases in the linear layers.", "--disable-bias-linear")
    add_qkv_bias: bool = flag(False, "A bias in the query, key and value projection, even with --disable-bias-linear.")
    qk_layernorm: bool = flag(False, "Normalise queries and keys.")
    transformer_impl: str = flag(
        None,
        "Whose layers: Transformer Engine's or megatron-core's own; by default Transformer Engine's where "
        "it is "
        "installed.",
        choices=("local", "transformer_engine"),
    )
    attention_backend: str = flag(
        "auto",
        "Which attention kernel Transformer Engine takes.",
        choices=("auto", "flash", "fused", "unfused", "local"),
    )

    def validate(self) -> None:
        """Rejects heads that do not fit the width, and two activation functions at once."""
        refuse(
            self.kv_channels is None,
            f"--hidden-size {self.hidden_size} is not a multiple of --num-attention-heads "
            f"{self.num_attention_heads}: change one of them, or give --kv-channels.",
        )
        refuse(
            not self.group_query_attention and self.num_query_groups not in (None, self.num_attention_heads),
            f"--num-query-groups {self.num_query_groups} has no effect without --group-query-attention: add it.",
        )
        refuse(
            self.num_query_groups is not None and self.num_attention_heads % self.num_query_groups,
            f"--num-attention-heads {self.num_attention_heads} is not a multiple of --num-query-groups "
            f"{self.num_query_groups}: change one of them.",
        )
        refuse(self.swiglu and self.squared_relu, "--swiglu and --squared-relu exclude each other: drop one.")
