"""The flags, by group: frozen dataclasses that validate themselves.  See ``megatron.pretraining.arguments``."""

from megatron.pretraining.config.checkpoint import CheckpointFlags
from megatron.pretraining.config.composed import Config, compose
from megatron.pretraining.config.data import DataFlags, split_blend
from megatron.pretraining.config.flag import ConfigError
from megatron.pretraining.config.fusion import CompatibilityFlags, FusionFlags
from megatron.pretraining.config.learning_rate import LearningRateFlags
from megatron.pretraining.config.logging import LoggingFlags, ValidationFlags
from megatron.pretraining.config.mixed_precision import MixedPrecisionFlags
from megatron.pretraining.config.moe import MoeFlags
from megatron.pretraining.config.network import NetworkFlags
from megatron.pretraining.config.parallel import ParallelFlags
from megatron.pretraining.config.regularization import RegularizationFlags
from megatron.pretraining.config.rng import RngFlags
from megatron.pretraining.config.tokenizer import TokenizerFlags
from megatron.pretraining.config.training import TrainingFlags
from megatron.pretraining.config.world import (
    check_backend,
    check_world,
    data_parallel_size,
    global_batch_size,
    layout_sizes,
    num_microbatches,
    train_iterations,
)

__all__ = [
    "CheckpointFlags",
    "CompatibilityFlags",
    "Config",
    "ConfigError",
    "DataFlags",
    "FusionFlags",
    "LearningRateFlags",
    "LoggingFlags",
    "MixedPrecisionFlags",
    "MoeFlags",
    "NetworkFlags",
    "ParallelFlags",
    "RegularizationFlags",
    "RngFlags",
    "TokenizerFlags",
    "TrainingFlags",
    "ValidationFlags",
    "check_backend",
    "check_world",
    "compose",
    "data_parallel_size",
    "global_batch_size",
    "layout_sizes",
    "num_microbatches",
    "split_blend",
    "train_iterations",
]
