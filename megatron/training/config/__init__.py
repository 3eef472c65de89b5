"""The flags, by group: frozen dataclasses that check themselves.  See ``megatron.training.arguments``."""

from megatron.training.config.checkpoint import Checkpoint
from megatron.training.config.composed import Config, compose
from megatron.training.config.data import Data, split_blend
from megatron.training.config.flag import ConfigError
from megatron.training.config.fusion import Compatibility, Fusion
from megatron.training.config.learning_rate import LearningRate
from megatron.training.config.logging import Logging, Validation
from megatron.training.config.mixed_precision import MixedPrecision
from megatron.training.config.moe import Moe
from megatron.training.config.network import Network
from megatron.training.config.parallel import Parallel
from megatron.training.config.regularization import Regularization
from megatron.training.config.rng import Rng
from megatron.training.config.tokenizer import Tokenizer
from megatron.training.config.training import Training
from megatron.training.config.world import (
    check_backend,
    check_world,
    data_parallel_size,
    global_batch_size,
    layout_sizes,
    num_microbatches,
    train_iterations,
)

__all__ = [
    "Checkpoint",
    "Compatibility",
    "Config",
    "ConfigError",
    "Data",
    "Fusion",
    "LearningRate",
    "Logging",
    "MixedPrecision",
    "Moe",
    "Network",
    "Parallel",
    "Regularization",
    "Rng",
    "Tokenizer",
    "Training",
    "Validation",
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
