"""Flags of validation and logging."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag, refuse


@dataclass(frozen=True)
class ValidationFlags(FlagGroup):
    """Validation: how often, and on how much."""

    eval_iters: int | None = flag(100, "Iterations of one evaluation; 0 does not evaluate.", at_least=0)
    eval_interval: int | None = flag(
        None, "Iterations between evaluations; by default there are none while training.", at_least=1
    )


@dataclass(frozen=True)
class LoggingFlags(FlagGroup):
    """Logging: console, TensorBoard, events."""

    log_interval: int = flag(100, "Iterations between lines on the console.", at_least=1)
    log_throughput: bool = flag(False, "Log TFLOP/s per GPU.")
    log_params_norm: bool = flag(False, "Log the norm of the weights.")
    log_num_zeros_in_grad: bool = flag(False, "Log how many gradients are zero.")
    log_timers_to_tensorboard: bool = flag(False, "Write timers to TensorBoard.")
    log_memory_to_tensorboard: bool = flag(False, "Write memory use to TensorBoard.")
    log_validation_ppl_to_tensorboard: bool = flag(False, "Write the perplexity of validation to TensorBoard.")
    tensorboard_dir: str | None = flag(None, "Directory of TensorBoard's files; without it there are none.")
    tensorboard_log_interval: int = flag(1, "Iterations between entries in TensorBoard.", at_least=1)
    tensorboard_queue_size: int = flag(1000, "Entries that TensorBoard holds before writing.", at_least=1)
    timing_log_level: int = flag(
        0, "Which timers run: 0 the iteration, 1 its parts, 2 parts that run often.", choices=(0, 1, 2)
    )
    timing_log_option: str = flag("minmax", "Of the times of all workers, log these.", choices=("max", "minmax", "all"))
    log_dir: str | None = flag(None, "Directory of events.jsonl and of the logs of this run.", metavar="DIR")

    def validate(self) -> None:
        """Rejects TensorBoard options without TensorBoard."""
        for name in ("timers", "memory", "validation_ppl"):
            refuse(
                getattr(self, f"log_{name}_to_tensorboard") and not self.tensorboard_dir,
                f"--log-{name.replace('_', '-')}-to-tensorboard needs --tensorboard-dir: add it.",
            )
