"""The flags, by group: frozen dataclasses that validate themselves."""

from megatron.pretraining.config.composed import Config
from megatron.pretraining.config.flag import ConfigError
from megatron.pretraining.config.moe import MoeFlags
from megatron.pretraining.config.network import NetworkFlags
from megatron.pretraining.config.world import (
    Workers,
    check_backend,
    check_domains,
    check_faults,
    check_fewest,
    check_placement,
    check_world,
    copy_by_copy,
    data_parallel_size,
    global_batch_size,
    layout_sizes,
    nodes_have_places,
    nodes_of_model,
    num_microbatches,
    plan_settings,
    ranks_of_stage,
    stage_size,
    stages_on_nodes,
    train_iterations,
    why_anew,
)

__all__ = [
    "Config",
    "ConfigError",
    "MoeFlags",
    "NetworkFlags",
    "Workers",
    "check_backend",
    "check_domains",
    "check_faults",
    "check_fewest",
    "check_placement",
    "check_world",
    "copy_by_copy",
    "data_parallel_size",
    "global_batch_size",
    "layout_sizes",
    "num_microbatches",
    "plan_settings",
    "stage_size",
    "train_iterations",
    "nodes_have_places",
    "nodes_of_model",
    "ranks_of_stage",
    "stages_on_nodes",
    "why_anew",
]
