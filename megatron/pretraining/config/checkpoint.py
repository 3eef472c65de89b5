"""Dense checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag


@dataclass(frozen=True)
class CheckpointFlags(FlagGroup):
    """Checkpointing: what is saved where, and what is loaded."""

    save: str | None = flag(
        None, "Directory of dense checkpoints; one is saved at the end, others by --save-interval.", metavar="DIR"
    )
    save_interval: int | None = flag(
        None,
        "Iterations between checkpoints; by default --save-retain-interval.",
        "--persistent-save-interval",
        limits=">= 1",
    )
    save_failure: str = flag(
        "continue",
        "When a checkpoint or snapshot cannot be saved: continue training and retry, or stop. A run whose last state "
        "is saved nowhere ends with an error either way.",
        choices=("continue", "stop"),
    )
    save_retain_interval: int | None = flag(
        None, "Keep only checkpoints at multiples of this many iterations, and the newest one.", limits=">= 1"
    )
    load: str | None = flag(None, "Directory to load the newest checkpoint from.", metavar="DIR")
    ckpt_step: int | None = flag(None, "Iteration to load instead of the newest.", limits=">= 0")
    async_save: bool = flag(False, "Write checkpoints in the background while training continues.")
    save_optim: bool = flag(True, "Save the optimizer state.")
    save_rng: bool = flag(True, "Save the state of random number generators.")
    load_optim: bool = flag(True, "Load the optimizer state.")
    load_rng: bool = flag(True, "Load the state of random number generators.")
    finetune: bool = flag(False, "Load the weights only, and start at iteration 0.")
    trust: bool = flag(
        False, "Load the weights of a checkpoint without our manifest, which another program wrote; nothing says "
        "whether it is whole. What could run code is refused in any case."
    )  # fmt: skip
    exit_on_missing_checkpoint: bool = flag(
        False, "End with an error if --load holds no checkpoint, instead of starting from iteration 0."
    )
    ckpt_format: str = flag("torch_dist", "Format of the weights; only megatron-core's.", choices=("torch_dist",))
