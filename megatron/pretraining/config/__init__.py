"""The flags, by group: frozen dataclasses that check themselves.  See ``megatron.pretraining.arguments``."""

from megatron.pretraining.config.checkpoint import Checkpoint
from megatron.pretraining.config.composed import Config, compose
from megatron.pretraining.config.data import Data, split_blend
from megatron.pretraining.config.flag import ConfigError
from megatron.pretraining.config.fusion import Compatibility, Fusion
from megatron.pretraining.config.learning_rate import LearningRate
from megatron.pretraining.config.logging import Logging, Validation
from megatron.pretraining.config.mixed_precision import MixedPrecision
from megatron.pretraining.config.moe import Moe
from megatron.pretraining.config.network import Network
from megatron.pretraining.config.parallel import Parallel
from megatron.pretraining.config.regularization import Regularization
from megatron.pretraining.config.rng import Rng
from megatron.pretraining.config.tokenizer import Tokenizer
from megatron.pretraining.config.training import Training
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
