"""Flags of the optimizer: learning rate, weight decay, dropout."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import REQUIRED, FlagGroup, flag


@dataclass(frozen=True)
class LearningRateFlags(FlagGroup):
    """Learning rate: warm-up, then decay."""

    lr: float = flag(REQUIRED, "Peak learning rate, at the end of the warm-up.", limits=">= 0")
    min_lr: float = flag(0.0, "Final learning rate, at the end of the decay.", limits=">= 0")
    lr_decay_style: str = flag(
        "linear",
        "Decay of the learning rate; WSD is warmup-stable-decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(None, "Iterations until the decay ends; by default --train-iters.", limits=">= 1")
    lr_decay_samples: int | None = flag(
        None, "Samples until the decay ends; by default --train-samples.", limits=">= 1"
    )
    lr_warmup_fraction: float | None = flag(None, "Warm-up as a fraction of the decay.", limits=">= 0, < 1")
    lr_warmup_iters: int = flag(0, "Iterations of warm-up.", limits=">= 0")
    lr_warmup_samples: int = flag(0, "Samples of warm-up.", limits=">= 0")
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.", limits=">= 0")
    lr_wsd_decay_style: str = flag(
        "exponential", "Decay in the last phase of WSD.", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = flag(None, "Iterations in the last phase of WSD.", limits=">= 1")
    lr_wsd_decay_samples: int | None = flag(None, "Samples in the last phase of WSD.", limits=">= 1")
    override_opt_param_scheduler: bool = flag(
        False, "On resume, use the schedule of the flags.", "--override-opt_param-scheduler"
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "On resume, use the schedule of the checkpoint.", "--use-checkpoint-opt_param-scheduler"
    )


@dataclass(frozen=True)
class RegularizationFlags(FlagGroup):
    """Optimizer and regularization."""

    optimizer: str = flag("adam", "Optimizer; adam is AdamW.", choices=("adam", "sgd"))
    attention_dropout: float = flag(0.1, "Dropout probability of attention weights.", limits=">= 0, < 1")
    hidden_dropout: float = flag(0.1, "Dropout probability of hidden states.", limits=">= 0, < 1")
    weight_decay: float = flag(0.01, "Weight decay.", limits=">= 0")
    start_weight_decay: float | None = flag(None, "Initial weight decay, if not constant.", limits=">= 0")
    end_weight_decay: float | None = flag(None, "Final weight decay, if not constant.", limits=">= 0")
    weight_decay_incr_style: str = flag(
        "constant", "Weight decay from start to end.", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(1.0, "L2 norm that gradients are clipped to; 0 turns clipping off.", limits=">= 0")
    grad_norm: str = flag(
        "exact",
        "Norm that gradients are clipped by: exact is a sum in float64, with the same bits in every layout; stock is "
        "Megatron-LM's in float32, the default of its scripts.",
        choices=("exact", "stock"),
    )
    adam_beta1: float = flag(0.9, "Adam: decay rate of the first moment.", limits=">= 0, < 1")
    adam_beta2: float = flag(0.999, "Adam: decay rate of the second moment.", limits=">= 0, < 1")
    adam_eps: float = flag(1e-8, "Adam: term added to the denominator.", limits="> 0")
    sgd_momentum: float = flag(0.9, "SGD: momentum.", limits=">= 0")
