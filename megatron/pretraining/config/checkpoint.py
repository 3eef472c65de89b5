"""Dense checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag, refuse


@dataclass(frozen=True)
class CheckpointFlags(FlagGroup):
    """Checkpointing: what is saved where, and what is loaded."""

    save: str | None = flag(
        None, "Directory to save checkpoints in; without --save-interval, only at the end.", metavar="DIR"
    )
    save_interval: int | None = flag(None, "Iterations between checkpoints.", "--persistent-save-interval", at_least=1)
    save_failure: str = flag(
        "continue",
        "What a save that fails does, of a checkpoint or a snapshot: training goes on and tries again, or stops. A run "
        "whose last state could not be saved anywhere ends with an error in any case.",
        choices=("continue", "stop"),
    )
    save_retain_interval: int | None = flag(
        None,
        "Keep checkpoints at iterations that this divides, and the newest one; delete the others.",
        at_least=1,
    )
    load: str | None = flag(None, "Directory to load the newest checkpoint from.", metavar="DIR")
    ckpt_step: int | None = flag(None, "Iteration to load in place of the newest.", at_least=0)
    async_save: bool = flag(False, "Write checkpoints while training goes on.")
    save_optim: bool = flag(True, "Save the optimizer.")
    save_rng: bool = flag(True, "Save the state of random number generators.")
    load_optim: bool = flag(True, "Load the optimizer.")
    load_rng: bool = flag(True, "Load the state of random number generators.")
    finetune: bool = flag(False, "Load weights alone, and start at iteration 0.")
    exit_on_missing_checkpoint: bool = flag(
        False, "End with an error where --load holds no checkpoint, in place of starting afresh."
    )
    ckpt_format: str = flag("torch_dist", "Format of the weights: megatron-core's.", choices=("torch_dist",))

    def validate(self) -> None:
        """Rejects options of a save or a load that is not configured."""
        refuse(self.save_interval and not self.save, "--save-interval needs --save: add it.")
        refuse(self.async_save and not self.save, "--async-save needs --save: add it.")
        refuse(
            self.save_retain_interval and not self.save_interval,
            "--save-retain-interval needs --save-interval: add it.",
        )
        refuse(
            self.save_retain_interval and self.save_interval and self.save_retain_interval % self.save_interval,
            f"--save-retain-interval {self.save_retain_interval} is not a multiple of --save-interval "
            f"{self.save_interval}: change one of them.",
        )
        refuse(self.finetune and not self.load, "--finetune needs --load: add it.")
        refuse(
            self.exit_on_missing_checkpoint and not self.load,
            "--exit-on-missing-checkpoint needs --load: add it.",
        )
