"""Flags of validation and logging."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag


@dataclass(frozen=True)
class ValidationFlags(FlagGroup):
    """Validation: how often, and on how much."""

    eval_iters: int | None = flag(100, "Iterations in one evaluation; 0 turns evaluation off.", limits=">= 0")
    eval_interval: int | None = flag(None, "Iterations between evaluations; by default only at the end.", limits=">= 1")
    start_eval_at_iter: int | None = flag(None, "Iteration of the first evaluation.", limits=">= 0")


@dataclass(frozen=True)
class LoggingFlags(FlagGroup):
    """Logging: console, TensorBoard, events."""

    log_interval: int = flag(100, "Iterations between lines on the console.", limits=">= 1")
    log_memory_interval: int | None = flag(None, "Iterations between lines about memory.", limits=">= 1")
    log_throughput: bool = flag(False, "Log TFLOP/s per GPU.")
    log_params_norm: bool = flag(False, "Log the L2 norm of the weights.")
    log_num_zeros_in_grad: bool = flag(False, "Log the number of gradient elements that are zero.")
    log_timers_to_tensorboard: bool = flag(False, "Write timers to TensorBoard.")
    log_memory_to_tensorboard: bool = flag(False, "Write memory use to TensorBoard.")
    log_validation_ppl_to_tensorboard: bool = flag(False, "Write the perplexity of validation to TensorBoard.")
    tensorboard_dir: str | None = flag(None, "Directory of TensorBoard files; without it none are written.")
    tensorboard_log_interval: int = flag(1, "Iterations between entries in TensorBoard.", limits=">= 1")
    tensorboard_queue_size: int = flag(1000, "Entries that TensorBoard buffers before writing.", limits=">= 1")
    timing_log_level: int = flag(
        0, "Timers that run: 0 none, 1 the phases of an iteration, 2 also operations that run often.", choices=(0, 1, 2)
    )
    timing_log_option: str = flag(
        "minmax",
        "Times of all workers to log: the maximum, minimum and maximum, or all.",
        choices=("max", "minmax", "all"),
    )
    log_dir: str | None = flag(None, "Directory of events.jsonl and of this run's logs.", metavar="DIR")
