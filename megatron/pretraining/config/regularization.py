"""Optimizer, weight decay and dropout."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag, refuse


@dataclass(frozen=True)
class RegularizationFlags(FlagGroup):
    """Optimizer and regularization."""

    optimizer: str = flag("adam", "Which optimizer; adam is AdamW.", choices=("adam", "sgd"))
    attention_dropout: float = flag(0.1, "Dropout on attention weights.", at_least=0, below=1)
    hidden_dropout: float = flag(0.1, "Dropout on hidden states.", at_least=0, below=1)
    weight_decay: float = flag(0.01, "Weight decay.", at_least=0)
    start_weight_decay: float | None = flag(None, "Weight decay at the start, where it is not constant.", at_least=0)
    end_weight_decay: float | None = flag(None, "Weight decay at the end, where it is not constant.", at_least=0)
    weight_decay_incr_style: str = flag(
        "constant", "How weight decay goes from start to end.", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(1.0, "Largest norm of the gradients; 0 does not clip.", at_least=0)
    adam_beta1: float = flag(0.9, "Adam: memory of the first moment.", at_least=0, below=1)
    adam_beta2: float = flag(0.999, "Adam: memory of the second moment.", at_least=0, below=1)
    adam_eps: float = flag(1e-8, "Adam: keeps it from dividing by zero.", above=0)
    sgd_momentum: float = flag(0.9, "SGD: momentum.", at_least=0)

    def validate(self) -> None:
        """Rejects a constant weight decay with two ends, and a varying one without both."""
        ends = (self.start_weight_decay, self.end_weight_decay)
        if self.weight_decay_incr_style == "constant":
            refuse(
                any(end not in (None, self.weight_decay) for end in ends),
                "--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or "
                "cosine: "
                "add it, or drop them.",
            )
            return
        refuse(
            None in ends,
            f"--weight-decay-incr-style {self.weight_decay_incr_style} needs --start-weight-decay and "
            "--end-weight-decay: add them.",
        )
        refuse(
            self.start_weight_decay is not None
            and self.end_weight_decay is not None
            and self.start_weight_decay > self.end_weight_decay,
            f"--start-weight-decay {self.start_weight_decay} is more than --end-weight-decay "
            f"{self.end_weight_decay}: lower it.",
        )
