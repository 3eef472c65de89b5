"""Flags of experts, routers and token dispatch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag, flags_of, refuse
from megatron.pretraining.config.layer_pattern import expand, parse_layer_freq

DROPPING_BALANCERS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


@dataclass(frozen=True)
class MoeFlags(FlagGroup):
    """Mixture of experts: experts, router, token dispatch."""

    preset = True

    num_experts: int | None = flag(None, "Experts in each layer that has them; none means a dense model.", at_least=1)
    moe_layer_freq: int | tuple[int, ...] = flag(
        1,
        "Which layers hold experts: N for the first of every N layers, or a list with one 0 (dense) or 1 "
        "(experts) "
        "per layer, such as ([0]*3+[1])*4.",
        type=parse_layer_freq,
        metavar="N|PATTERN",
    )
    expert_interval: int | None = flag(
        None,
        "As in Megatron-DeepSpeed: the last of every N layers holds experts.  Becomes --moe-layer-freq.",
        at_least=1,
    )
    moe_ffn_hidden_size: int | None = flag(None, "Inner width of an expert; by default --ffn-hidden-size.", at_least=1)
    moe_shared_expert_intermediate_size: int | None = flag(
        None,
        "Inner width of the shared experts that every token visits: their number times the width of one.",
        at_least=1,
    )
    moe_shared_expert_overlap: bool = flag(
        False, "Compute shared experts while tokens travel; needs --moe-token-dispatcher-type alltoall."
    )
    moe_grouped_gemm: bool = flag(
        False, "Compute all local experts in one grouped kernel; needs Transformer Engine or grouped_gemm."
    )
    moe_router_load_balancing_type: str = flag(
        "aux_loss",
        "How the load of experts is kept even.",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    )
    moe_router_dtype: str | None = flag(
        None, "Precision of the routing; by default that of the model.", choices=("fp32", "fp64")
    )
    moe_router_score_function: str = flag(
        "softmax", "Turns the router's outputs into scores.", choices=("softmax", "sigmoid")
    )
    moe_router_topk: int = flag(2, "Experts that each token visits.", "--topk", at_least=1)
    moe_router_pre_softmax: bool = flag(False, "Take the softmax over all experts, before choosing the top k.")
    moe_router_topk_scaling_factor: float | None = flag(None, "Scales the scores of the chosen experts.", above=0)
    moe_router_num_groups: int | None = flag(None, "Groups of experts for routing limited to groups.", at_least=1)
    moe_router_group_topk: int | None = flag(
        None, "Groups that each token may choose from; needs --moe-router-num-groups.", at_least=1
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "Balance without a loss, by a bias on each expert; needs --moe-router-score-function sigmoid."
    )
    moe_router_bias_update_rate: float = flag(1e-3, "How far the bias of an expert moves each iteration.", at_least=0)
    moe_aux_loss_coeff: float = flag(0.0, "Weight of the load balancing loss.", "--moe-loss-coeff", at_least=0)
    moe_z_loss_coeff: float | None = flag(None, "Weight of the loss on large router outputs.", at_least=0)
    moe_input_jitter_eps: float | None = flag(None, "Noise on the router's input.", at_least=0)
    moe_per_layer_logging: bool = flag(False, "Log the losses of the router layer by layer.")
    moe_token_dispatcher_type: str = flag(
        "allgather", "How tokens travel to their experts.", choices=("allgather", "alltoall", "flex")
    )
    moe_expert_capacity_factor: float | None = flag(
        None,
        "Tokens an expert takes, as a multiple of the even share; none or a negative number drops no token.",
    )
    moe_pad_expert_input_to_capacity: bool = flag(
        False, "Pad the input of each expert to its capacity; needs --moe-expert-capacity-factor."
    )
    moe_token_drop_policy: str = flag(
        "probs",
        "Which tokens a full expert drops: the least probable, or the last.",
        choices=("probs", "position"),
    )
    moe_permute_fusion: bool = flag(False, "Fused kernels for sorting tokens; needs Transformer Engine.")

    def expert_layers(self, num_layers: int) -> tuple[int, ...]:
        """One entry per layer: 1 if it holds experts, 0 if it is dense."""
        return expand(self.moe_layer_freq, num_layers) if self.num_experts else (0,) * num_layers

    def validate(self) -> None:
        """Rejects invalid routing, mostly before megatron-core would."""
        if self.num_experts is None:
            self._refuse_flags_of_experts()
            return
        topk, experts = self.moe_router_topk, self.num_experts
        refuse(
            topk > experts,
            f"--moe-router-topk {topk} is more than --num-experts {experts}: lower it or add experts.",
        )
        refuse(
            self.moe_router_enable_expert_bias and self.moe_router_score_function != "sigmoid",
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid: add it.",
        )
        refuse(
            topk == 1
            and self.moe_router_score_function == "softmax"
            and not self.moe_router_pre_softmax
            and self.moe_router_load_balancing_type != "sinkhorn",
            "--moe-router-topk 1 gives the router no gradient without --moe-router-pre-softmax: add it.",
        )
        refuse(
            self.moe_router_load_balancing_type == "sinkhorn" and self.moe_aux_loss_coeff,
            "--moe-router-load-balancing-type sinkhorn has no loss: drop --moe-aux-loss-coeff.",
        )
        self._validate_router_groups()
        self._validate_capacity()
        self._validate_shared_experts()

    def _refuse_flags_of_experts(self) -> None:
        for spec in flags_of(MoeFlags):
            refuse(
                getattr(self, spec.name) != spec.default,
                f"{spec.spelling} has no effect without --num-experts: add it, or drop {spec.spelling}.",
            )

    def _validate_router_groups(self) -> None:
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        refuse(
            (groups is None) != (chosen is None),
            "--moe-router-num-groups and --moe-router-group-topk go together: give both or neither.",
        )
        experts = self.num_experts
        if groups is None or chosen is None or experts is None:
            return
        refuse(
            experts % groups,
            f"--num-experts {experts} is not a multiple of --moe-router-num-groups {groups}: change one of them.",
        )
        refuse(
            chosen > groups,
            f"--moe-router-group-topk {chosen} is more than --moe-router-num-groups {groups}: lower it.",
        )
        refuse(
            not chosen <= self.moe_router_topk <= chosen * (experts // groups),
            f"--moe-router-topk {self.moe_router_topk} experts cannot come from --moe-router-group-topk "
            f"{chosen} "
            f"groups of {experts // groups}: change one of them.",
        )

    def _validate_capacity(self) -> None:
        refuse(
            self.moe_expert_capacity_factor is not None
            and self.moe_router_load_balancing_type not in DROPPING_BALANCERS,
            "--moe-expert-capacity-factor works with --moe-router-load-balancing-type "
            f"{', '.join(DROPPING_BALANCERS)}, not {self.moe_router_load_balancing_type}: change one of "
            "them.",
        )
        refuse(
            self.moe_pad_expert_input_to_capacity and self.moe_expert_capacity_factor is None,
            "--moe-pad-expert-input-to-capacity needs a positive --moe-expert-capacity-factor: add it.",
        )

    def _validate_shared_experts(self) -> None:
        refuse(
            self.moe_shared_expert_overlap and self.moe_shared_expert_intermediate_size is None,
            "--moe-shared-expert-overlap needs --moe-shared-expert-intermediate-size: add it.",
        )
        refuse(
            self.moe_shared_expert_overlap and self.moe_token_dispatcher_type != "alltoall",
            "--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall: change it.",
        )
