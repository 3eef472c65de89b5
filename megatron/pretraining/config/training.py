"""Flags of training length, batches and exits."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag, refuse


@dataclass(frozen=True)
class TrainingFlags(FlagGroup):
    """Training: batches, length, exits, recomputation of activations."""

    micro_batch_size: int = flag(None, "Samples in one pass through the model.", required=True, at_least=1)
    global_batch_size: int | None = flag(
        None,
        "Samples in one iteration, over all workers; by default --micro-batch-size times the data-parallel size.",
        at_least=1,
    )
    train_iters: int | None = flag(None, "Iterations to train, over all runs together.", at_least=1)
    train_samples: int | None = flag(None, "Samples to train, over all runs together.", at_least=1)
    skip_train: bool = flag(
        False, "Train nothing: go on from what there is, save it where --save is given, evaluate, and end."
    )
    exit_interval: int | None = flag(None, "Save and exit at an iteration that this number divides.", at_least=1)
    exit_duration_in_mins: int | None = flag(None, "Save and exit after so many minutes.", at_least=1)
    exit_signal_handler: bool = flag(False, "Save and exit when --exit-signal arrives.")
    exit_signal: str = flag(
        "SIGTERM",
        "The signal that --exit-signal-handler waits for.",
        choices=("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT"),
    )
    recompute_activations: bool = flag(False, "The same as --recompute-granularity selective.")
    recompute_granularity: str | None = flag(
        None,
        "Save memory by computing activations again in the backward pass: of whole layers, or of attention alone.",
        choices=("full", "selective"),
    )
    recompute_method: str | None = flag(
        None,
        "With full recomputation: divide all layers evenly, or recompute the first ones of each stage.",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        None, "Layers in one recomputed unit (uniform), or recomputed layers in a stage (block).", at_least=1
    )
    calculate_per_token_loss: bool = flag(False, "Average the loss over tokens in place of micro batches.")
    check_for_nan_in_loss_and_grad: bool = flag(
        True, "Stop at a loss or gradient that is not finite.  Off with the dynamic loss scaling of --fp16."
    )
    deterministic_mode: bool = flag(
        False,
        "On CUDA, take deterministic kernels alone: repeated runs are bit-identical, and slower.  CPUs always are.",
    )
    use_cpu_initialization: bool = flag(
        False, "Initialise weights on the CPU.  They are the same either way, in every layout."
    )
    manual_gc: bool = flag(False, "Collect garbage at the same iterations on all workers.")
    manual_gc_interval: int = flag(0, "Iterations between collections with --manual-gc; 0 for none.", at_least=0)

    def validate(self) -> None:
        """Rejects a training length given twice or not at all, and incomplete recomputation options."""
        refuse(
            self.train_iters is None and self.train_samples is None,
            "the length of the training is missing: give --train-iters or --train-samples.",
        )
        refuse(
            self.train_iters is not None and self.train_samples is not None,
            "--train-iters and --train-samples exclude each other: drop one.",
        )
        refuse(
            self.global_batch_size is not None and self.global_batch_size % self.micro_batch_size,
            f"--global-batch-size {self.global_batch_size} is not a multiple of --micro-batch-size "
            f"{self.micro_batch_size}: change one of them.",
        )
        refuse(
            self.manual_gc_interval and not self.manual_gc,
            "--manual-gc-interval has no effect without --manual-gc: add it.",
        )
        self._validate_recomputation()

    def _validate_recomputation(self) -> None:
        refuse(
            self.recompute_activations and self.recompute_granularity == "full",
            "--recompute-activations means --recompute-granularity selective, not full: drop one of them.",
        )
        full = self.recompute_granularity == "full"
        refuse(
            full and (self.recompute_method is None or self.recompute_num_layers is None),
            "--recompute-granularity full needs --recompute-method and --recompute-num-layers: add them.",
        )
        refuse(
            not full and (self.recompute_method is not None or self.recompute_num_layers is not None),
            "--recompute-method and --recompute-num-layers belong to --recompute-granularity full: "
            "add that, or drop them.",
        )
