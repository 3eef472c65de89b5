"""Number formats."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag


@dataclass(frozen=True)
class MixedPrecisionFlags(FlagGroup):
    """Mixed precision: fp32 unless --bf16 or --fp16."""

    fp16: bool = flag(False, "Compute in fp16, with loss scaling.")
    bf16: bool = flag(False, "Compute in bfloat16.")
    main_params_dtype: str = flag(
        "fp32", "Format of the master weights; with bf16 the weights are their own masters.", choices=("fp32", "bf16")
    )
    exp_avg_dtype: str | None = flag(
        None,
        "Format of Adam's first moment; by default fp32, or that of weights that are their own masters.",
        choices=("fp32", "fp16", "fp8"),
    )
    exp_avg_sq_dtype: str | None = flag(
        None,
        "Format of Adam's second moment; if only one of the two is given, the other is fp32.",
        choices=("fp32", "fp16"),
    )
    fp8_format: str | None = flag(
        None,
        "Compute matrix products in fp8, by Transformer Engine or, with --transformer-impl local, by torch: all "
        "tensors in e4m3, or gradients in e5m2 (hybrid).",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = flag(
        "tensorwise",
        "Scaling of tensors to fp8: each by its largest value, or in blocks (Transformer Engine only); delayed "
        "scaling is refused.",
        choices=("tensorwise", "blockwise", "mxfp8", "delayed"),
    )
    loss_scale: float | None = flag(None, "Fixed loss scale; by default, or with 0, it is adaptive.", limits=">= 0")
    initial_loss_scale: float = flag(float(2**32), "Initial adaptive loss scale.", limits="> 0")
    min_loss_scale: float = flag(1.0, "Minimum adaptive loss scale.", limits="> 0")
    loss_scale_window: float = flag(
        1000.0, "Iterations without overflow after which the loss scale doubles.", limits="> 0"
    )
    hysteresis: int = flag(2, "Overflows after which the loss scale halves.", limits=">= 1")
    fp32_residual_connection: bool = flag(False, "Keep the residual stream in fp32.")
    attention_softmax_in_fp32: bool = flag(False, "Compute the attention softmax in fp32.")
    apply_query_key_layer_scaling: bool = flag(
        False, "Scale attention scores by the layer number; implies --attention-softmax-in-fp32."
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "Accumulate and reduce gradients in fp32; always on with --bf16 and fp32 master weights."
    )

    @property
    def moments(self) -> tuple[str, str] | None:
        """Formats of both moments; None if the optimizer decides."""
        if self.exp_avg_dtype is None and self.exp_avg_sq_dtype is None:
            return None
        return self.exp_avg_dtype or "fp32", self.exp_avg_sq_dtype or "fp32"
