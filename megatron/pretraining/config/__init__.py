"""Defines the flags, by group, as frozen dataclasses that validate themselves."""

from megatron.pretraining.config.flag import ConfigError
from megatron.pretraining.config.groups import Config
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
    nodes_have_rank_blocks,
    nodes_of_model,
    num_microbatches,
    plan_settings,
    ranks_of_stage,
    restart_reason,
    stage_size,
    stages_on_nodes,
    train_iterations,
    train_samples,
)
