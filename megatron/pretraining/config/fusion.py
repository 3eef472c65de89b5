"""Flags of fused kernels, and flags accepted only for compatibility."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag


@dataclass(frozen=True)
class FusionFlags(FlagGroup):
    """Fused kernels: used if installed, unless turned off."""

    masked_softmax_fusion: bool = flag(True, "Fuse scaling, masking and softmax of attention.")
    bias_gelu_fusion: bool = flag(True, "Fuse bias and GELU; only in dense models with biases.")
    bias_swiglu_fusion: bool = flag(True, "Fuse bias and gated SiLU.")
    bias_dropout_fusion: bool = flag(True, "Fuse bias, dropout and residual.")
    apply_rope_fusion: bool = flag(True, "Fuse rotary position embeddings.", "--no-rope-fusion")
    gradient_accumulation_fusion: bool = flag(True, "Accumulate weight gradients within the matrix product.")


@dataclass(frozen=True)
class CompatibilityFlags(FlagGroup):
    """Compatibility: flags of Megatron launch scripts, without effect here."""

    use_mcore_models: bool = flag(False, "Accepted for compatibility; always on.")
    use_flash_attn: bool = flag(False, "Accepted for compatibility; see --attention-backend.")
    create_attention_mask_in_dataloader: bool = flag(True, "Accepted for compatibility; see --reset-attention-mask.")
    local_rank: int | None = flag(None, "Accepted for compatibility; LOCAL_RANK is used.", "--local_rank")
    add_position_embedding: bool = flag(
        True, "Accepted for compatibility; see --position-embedding-type.", "--no-position-embedding"
    )
