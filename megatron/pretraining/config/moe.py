"""Flags of experts, routers and token dispatch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag
from megatron.pretraining.config.layer_pattern import expand, parse_layer_freq


@dataclass(frozen=True)
class MoeFlags(FlagGroup):
    """Mixture of experts: experts, router, token dispatch."""

    preset = True

    num_experts: int | None = flag(None, "Experts in each MoE layer; none or 0 for a dense model.", limits=">= 0")
    moe_layer_freq: int | tuple[int, ...] = flag(
        1,
        "MoE layers: the first of every N layers, or a list with one 0 (dense) or 1 (MoE) per layer, such as "
        "([0]*3+[1])*4.",
        type=parse_layer_freq,
        metavar="N|PATTERN",
        limits=">= 1",
    )
    expert_interval: int | None = flag(
        None, "As in Megatron-DeepSpeed: the last of every N layers is an MoE layer.", limits=">= 1"
    )
    moe_ffn_hidden_size: int | None = flag(
        None, "Inner width of an expert; by default --ffn-hidden-size.", limits=">= 1"
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "Inner width of all shared experts together, which process every token.", limits=">= 1"
    )
    moe_shared_expert_gate: bool = flag(
        False, "Weigh what shared experts add to a token by a sigmoid of the token, as Qwen2-MoE does."
    )
    moe_shared_expert_overlap: bool = flag(
        False, "Compute shared experts during token dispatch; needs --moe-token-dispatcher-type alltoall."
    )
    moe_grouped_gemm: bool = flag(
        False, "Compute all local experts in one grouped GEMM; needs Transformer Engine or grouped_gemm."
    )
    moe_router_load_balancing_type: str = flag(
        "aux_loss",
        "Load balancing of experts.",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none"),
    )
    moe_router_dtype: str | None = flag(
        None, "Precision of the router; by default the model's.", choices=("fp32", "fp64")
    )
    moe_router_score_function: str = flag(
        "softmax", "Function from router logits to scores.", choices=("softmax", "sigmoid")
    )
    moe_router_topk: int = flag(2, "Experts per token (top-k).", "--topk", limits=">= 1")
    moe_router_pre_softmax: bool = flag(False, "Apply the softmax before the top-k selection.")
    moe_router_topk_scaling_factor: float | None = flag(
        None, "Factor on the scores of the selected experts.", limits="> 0"
    )
    moe_router_num_groups: int | None = flag(None, "Groups of experts for group-limited routing.", limits=">= 1")
    moe_router_group_topk: int | None = flag(
        None, "Groups selected per token; needs --moe-router-num-groups.", limits=">= 1"
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "Balance load by a bias per expert, without a loss; needs --moe-router-score-function sigmoid."
    )
    moe_router_bias_update_rate: float = flag(1e-3, "Change of an expert's bias per iteration.", limits=">= 0")
    moe_router_quantile_balancing_ema: float = flag(
        0.0,
        "Weight of the previous biases in their average; needs --moe-router-load-balancing-type quantile_balancing.",
        limits=">= 0",
    )
    moe_aux_loss_coeff: float = flag(0.0, "Weight of the load-balancing loss.", "--moe-loss-coeff", limits=">= 0")
    moe_z_loss_coeff: float | None = flag(None, "Weight of the z-loss on large router logits.", limits=">= 0")
    moe_input_jitter_eps: float | None = flag(
        None, "Range of the multiplicative noise on the router's input.", limits=">= 0"
    )
    moe_per_layer_logging: bool = flag(False, "Log router losses by layer.")
    moe_token_dispatcher_type: str | None = flag(
        None,
        "Communication that sends tokens to their experts; by default allgather, and with --elastic its own, which "
        "counts as alltoall.",
        choices=("allgather", "alltoall", "flex"),
    )
    moe_expert_capacity_factor: float | None = flag(
        None, "Capacity of an expert as a multiple of the even share of tokens; none or negative drops no token."
    )
    moe_pad_expert_input_to_capacity: bool = flag(
        False, "Pad the input of each expert to its capacity; needs --moe-expert-capacity-factor."
    )
    moe_token_drop_policy: str = flag(
        "probs", "Tokens that a full expert drops: the least probable, or the last.", choices=("probs", "position")
    )
    moe_permute_fusion: bool = flag(False, "Fused kernels that sort tokens by expert; needs Transformer Engine.")

    def expert_layers(self, num_layers: int) -> tuple[int, ...]:
        """One entry per layer: 1 if it holds experts, 0 if it is dense."""
        return expand(self.moe_layer_freq, num_layers) if self.num_experts else (0,) * num_layers

    @property
    def drops_tokens(self) -> bool:
        """Whether experts have a capacity beyond which they drop tokens, and are not filled up to it."""
        return self.moe_expert_capacity_factor is not None and not self.moe_pad_expert_input_to_capacity
