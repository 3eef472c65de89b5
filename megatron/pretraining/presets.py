"""Model shapes by name, for ``--model``: the papers' models, and tiny ones to experiment with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """Values of flags, and the source's parameter counts."""

    source: str
    values: Mapping[str, object]
    """By field name; a flag overrides its value."""
    vocab_size: int
    """Vocabulary that the parameters are counted with; training takes the tokenizer's."""
    total_parameters: float | None = None
    """According to the source."""
    active_parameters: float | None = None
    """According to the source: parameters that one token passes through."""
    chosen: str = ""
    """Values chosen here because the source leaves them out."""


# The GPT-3-like models of DeepSpeed-MoE, which MoC-System adopts: learned positions, GELU, biases, experts in every
# other layer, top-1 routing.  MoC-System's Table 1 gives layers, widths, heads and experts.
_GPT_3_LIKE = dict(
    seq_length=2048, expert_interval=2, moe_router_topk=1, moe_router_pre_softmax=True, moe_aux_loss_coeff=0.01
)

_LLAMA_LIKE = dict(
    seq_length=2048,
    position_embedding_type="rope",
    normalization="RMSNorm",
    norm_epsilon=1e-6,
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    moe_aux_loss_coeff=0.001,
)

_TINY = dict(
    hidden_size=128,
    num_attention_heads=4,
    seq_length=128,
    num_experts=8,
    moe_router_topk=2,
    moe_aux_loss_coeff=0.01,
    untie_embeddings_and_output_weights=True,
)

PRESETS: dict[str, Preset] = {
    "micro": Preset(
        source="none: small enough for unit tests",
        values={**_TINY, "num_layers": 2, "hidden_size": 64, "num_experts": 4, "seq_length": 64},
        vocab_size=512,
    ),
    "tiny": Preset(source="none: trains on two CPU cores", values={**_TINY, "num_layers": 4}, vocab_size=4096),
    "gpt-125m-8e": Preset(
        source="MoC-System (ASPLOS '25), Table 1",
        values={**_GPT_3_LIKE, "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "num_experts": 8},
        vocab_size=50257,
        total_parameters=323e6,
        chosen="feed-forward width (4 x hidden), which of the layers hold experts, top-1, GPT-2's vocabulary",
    ),
    "gpt-350m-16e": Preset(
        source="MoC-System (ASPLOS '25), Table 1",
        values={**_GPT_3_LIKE, "num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "num_experts": 16},
        vocab_size=50257,
        # These dimensions give 1.87e9, as in DeepSpeed-MoE; the table's "1.7G" counts in units of 2**30.
        total_parameters=1.7 * 2**30,
        chosen="feed-forward width (4 x hidden), which of the layers hold experts, top-1, GPT-2's vocabulary",
    ),
    "gpt-moe-7b": Preset(
        source="MoEvement (NSDI '26), Table 2: GPT-MoE",
        values=dict(
            num_layers=12,
            hidden_size=1536,
            num_attention_heads=12,
            seq_length=2048,
            untie_embeddings_and_output_weights=True,
            num_experts=32,
            moe_router_topk=6,
            moe_aux_loss_coeff=0.01,
        ),
        vocab_size=50257,
        total_parameters=7.3e9,
        active_parameters=1.6e9,
        chosen="width 1536, 4 x that in each expert, 12 heads, experts in every layer, GPT-2's vocabulary",
    ),
    "qwen-moe-14b": Preset(
        source="MoEvement (NSDI '26), Table 2: QWen-MoE",
        values=dict(
            _LLAMA_LIKE,
            num_layers=24,
            hidden_size=2048,
            ffn_hidden_size=5632,
            num_attention_heads=16,
            add_qkv_bias=True,
            num_experts=64,
            moe_ffn_hidden_size=1408,
            moe_router_topk=8,
            moe_router_pre_softmax=True,
        ),
        vocab_size=151936,
        total_parameters=14.3e9,
        active_parameters=2.7e9,
        chosen="widths, heads and vocabulary of Qwen1.5-MoE-A2.7B, whose 4 shared and 60 routed experts "
        "count as 64 routed ones, 8 per token, in the table",
    ),
    "deepseek-moe-16b": Preset(
        source="MoEvement (NSDI '26), Table 2: DeepSeek-MoE",
        values=dict(
            _LLAMA_LIKE,
            num_layers=28,
            hidden_size=2048,
            ffn_hidden_size=10944,
            num_attention_heads=16,
            num_experts=64,
            moe_layer_freq=(0,) + (1,) * 27,
            moe_ffn_hidden_size=1408,
            # DeepSeekMoE 16B has 2 x 1408; with the table's top-8 that gives 3.3e9 active parameters, not its 3.7e9.
            moe_shared_expert_intermediate_size=2 * 2816,
            moe_router_topk=8,
            moe_router_pre_softmax=True,
        ),
        vocab_size=102400,
        total_parameters=16.4e9,
        active_parameters=3.7e9,
        chosen="widths, heads, dense first layer and vocabulary of DeepSeekMoE 16B, with shared experts "
        "twice as wide, so that the active parameters come out",
    ),
}
