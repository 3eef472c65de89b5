"""Flags of the learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag, refuse


@dataclass(frozen=True)
class LearningRateFlags(FlagGroup):
    """Learning rate: warm-up, then decay."""

    lr: float = flag(None, "Highest learning rate, reached at the end of the warm-up.", required=True, above=0)
    min_lr: float = flag(0.0, "Lowest learning rate, reached at the end of the decay.", at_least=0)
    lr_decay_style: str = flag(
        "linear",
        "Shape of the decay; WSD is warm-up, stable, decay.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(None, "Iterations until the decay ends; by default --train-iters.", at_least=1)
    lr_decay_samples: int | None = flag(None, "Samples until the decay ends; by default --train-samples.", at_least=1)
    lr_warmup_fraction: float | None = flag(None, "Share of the decay that is warm-up.", at_least=0, below=1)
    lr_warmup_iters: int = flag(0, "Iterations of warm-up.", at_least=0)
    lr_warmup_samples: int = flag(0, "Samples of warm-up.", at_least=0)
    lr_warmup_init: float = flag(0.0, "Learning rate at the start of the warm-up.", at_least=0)
    lr_wsd_decay_style: str = flag(
        "exponential",
        "Shape of the last phase of WSD.",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_wsd_decay_iters: int | None = flag(None, "Iterations in the last phase of WSD.", at_least=1)
    lr_wsd_decay_samples: int | None = flag(None, "Samples in the last phase of WSD.", at_least=1)
    override_opt_param_scheduler: bool = flag(
        False, "On resume, take the schedule from the flags.", "--override-opt_param-scheduler"
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "On resume, take the schedule from the checkpoint.", "--use-checkpoint-opt_param-scheduler"
    )

    def validate(self) -> None:
        """Rejects limits in the wrong order, and a warm-up or schedule source given twice."""
        refuse(
            self.min_lr > self.lr,
            f"--min-lr {self.min_lr} is more than --lr {self.lr}: lower it.",
        )
        refuse(
            self.lr_warmup_init > self.lr,
            f"--lr-warmup-init {self.lr_warmup_init} is more than --lr {self.lr}: lower it.",
        )
        refuse(
            self.lr_warmup_fraction is not None and (self.lr_warmup_iters or self.lr_warmup_samples),
            "--lr-warmup-fraction excludes --lr-warmup-iters and --lr-warmup-samples: keep one.",
        )
        refuse(
            self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler,
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other: drop one.",
        )
