"""Number formats."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag, refuse


@dataclass(frozen=True)
class MixedPrecisionFlags(FlagGroup):
    """Mixed precision: 32 bits unless --bf16 or --fp16."""

    fp16: bool = flag(False, "Compute in fp16, with loss scaling.")
    bf16: bool = flag(False, "Compute in bfloat16.")
    main_params_dtype: str = flag(
        "fp32",
        "Format of master weights; bf16: the weights are their own masters, and moments have the format that the "
        "optimizer gives them.",
        choices=("fp32", "bf16"),
    )
    exp_avg_dtype: str | None = flag(
        None,
        "Format in which Adam's first moment is kept; by default as the optimizer makes it: in 32 bits, or in those of "
        "weights that are their own masters.",
        choices=("fp32", "fp16", "fp8"),
    )
    exp_avg_sq_dtype: str | None = flag(
        None,
        "The same of the second moment; if only one of them is given, the other has 32 bits.",
        choices=("fp32", "fp16"),
    )
    fp8_format: str | None = flag(
        None,
        "Multiply matrices in 8 bits, by Transformer Engine or, with --transformer-impl local, by torch: all in e4m3, "
        "or with gradients in e5m2 (hybrid).",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = flag(
        "tensorwise",
        "How tensors are scaled to 8 bits: each by its largest value, or in blocks, which takes Transformer Engine; "
        "delayed scaling, which remembers earlier iterations, is refused.",
        choices=("tensorwise", "blockwise", "mxfp8", "delayed"),
    )
    loss_scale: float | None = flag(None, "Fixed loss scale; by default it adapts itself.", above=0)
    initial_loss_scale: float = flag(float(2**32), "First value of the adaptive loss scale.", above=0)
    min_loss_scale: float = flag(1.0, "Lowest value of the adaptive loss scale.", above=0)
    loss_scale_window: float = flag(1000.0, "Iterations without overflow after which the loss scale doubles.", above=0)
    hysteresis: int = flag(2, "Overflows after which the loss scale halves.", at_least=1)
    fp32_residual_connection: bool = flag(False, "Keep the residual stream in 32 bits.")
    attention_softmax_in_fp32: bool = flag(False, "Compute the softmax of attention in 32 bits.")
    apply_query_key_layer_scaling: bool = flag(
        False, "Scale attention scores by the layer number; implies --attention-softmax-in-fp32."
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False,
        "Accumulate and reduce gradients in 32 bits; always so with --bf16 and masters in 32 bits.",
    )

    @property
    def moments(self) -> tuple[str, str] | None:
        """Formats of both moments; None if the optimizer decides."""
        if self.exp_avg_dtype is None and self.exp_avg_sq_dtype is None:
            return None
        return self.exp_avg_dtype or "fp32", self.exp_avg_sq_dtype or "fp32"

    def validate(self) -> None:
        """Rejects contradictory formats."""
        refuse(self.fp16 and self.bf16, "--fp16 and --bf16 exclude each other: drop one.")
        refuse(
            self.main_params_dtype == "bf16" and not self.bf16,
            "--main-params-dtype bf16 updates the weights themselves, so they must be in bf16: add --bf16.",
        )
        refuse(
            self.main_params_dtype == "bf16" and self.accumulate_allreduce_grads_in_fp32,
            "--main-params-dtype bf16 takes gradients in bf16, too: drop --accumulate-allreduce-grads-in-fp32.",
        )
        refuse(
            self.fp8_format and not (self.fp16 or self.bf16),
            f"--fp8-format {self.fp8_format} needs weights in 16 bits: add --bf16 or --fp16.",
        )
        refuse(
            self.fp8_recipe == "delayed",
            "--fp8-recipe delayed scales by maxima of earlier iterations, which no checkpoint holds, so that a run "
            "would not go on as it was: choose tensorwise, blockwise or mxfp8.",
        )
        refuse(
            self.fp32_residual_connection and not (self.fp16 or self.bf16),
            "--fp32-residual-connection has no effect without --fp16 or --bf16: add one, or drop it.",
        )
        refuse(
            self.min_loss_scale > self.initial_loss_scale,
            f"--min-loss-scale {self.min_loss_scale} is more than --initial-loss-scale "
            f"{self.initial_loss_scale}: lower it.",
        )
