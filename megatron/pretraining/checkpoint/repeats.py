"""Flags that determine gradients and updates: stored with each snapshot, and compared before a replay.

A replay under other flags computes other gradients or updates, so that its state differs from the lost state.  The
schedule of learning rates and weight decay is compared by its state, since a run may continue the stored schedule.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.pretraining.config import Config
from megatron.pretraining.config.deterministic import promises_bits
from megatron.pretraining.config.flag import dashed
from megatron.pretraining.config.groups import group_classes
from megatron.pretraining.data.identity import DataIdentity, changes_since
from moc.files.decode import parse
from moc.files.text import short_repr
from moc.store.errors import CheckpointError

KEY = "repeated"
"""The key of the flags in a snapshot's state."""
_UPDATES = """
    clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum decoupled_weight_decay decoupled_lr decoupled_min_lr
    muon_momentum muon_use_nesterov muon_num_ns_steps muon_scale_mode muon_extra_scale_factor muon_split_qkv
    """
_GRADIENTS = """
    attention_dropout hidden_dropout calculate_per_token_loss norm_epsilon rotary_base rotary_percent rotary_interleaved
    rotary_scaling_factor attention_softmax_in_fp32 apply_query_key_layer_scaling fp32_residual_connection
    accumulate_allreduce_grads_in_fp32 window_size softmax_scale mtp_loss_scaling_factor reset_position_ids
    reset_attention_mask eod_mask_loss moe_router_topk moe_router_load_balancing_type moe_aux_loss_coeff
    moe_z_loss_coeff moe_router_dtype moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor
    moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias moe_router_bias_update_rate
    moe_router_quantile_balancing_ema moe_input_jitter_eps moe_expert_capacity_factor moe_pad_expert_input_to_capacity
    moe_token_drop_policy correct
    """
_NAMES = (*_UPDATES.split(), *_GRADIENTS.split())
_POSITION = "num_steps"
"""The part of the schedule's state that changes in a run."""


def repeated(config: Config) -> dict[str, Any]:
    """Returns the flags that determine this run's gradients and updates, by name, as values of JSON."""
    places = [*(getattr(config, group) for group in group_classes()), getattr(config, "arguments", None)]
    found = {}
    for name in _NAMES:
        owner = next((place for place in places if hasattr(place, name)), None)
        if owner is not None:
            found[name] = getattr(owner, name)
    return parse(json.dumps(found, default=str))


def check_replay(
    config: Config, scheduler: OptimizerParamScheduler, data: DataIdentity | None, saved: Mapping, where: object
) -> None:
    """Refuses the replay of a snapshot under other flags or with other data, without ``--allow-nondeterministic``.

    Args:
        config: the flags in force.
        scheduler: scheduler of this run, before the saved schedule is loaded.
        data: the data that this run reads.
        saved: the snapshot's state; a snapshot of an earlier release has no flags.
        where: path of the snapshot, for the message.

    Raises:
        CheckpointError: the flags differ; the message lists all of them.
    """
    if not promises_bits(config) or config.training.allow_nondeterministic:
        return
    here, there = repeated(config), saved.get(KEY) or {}
    names = [name for name, value in here.items() if name in there and there[name] != value]
    changes = [f"{dashed(name)} is {short_repr(there[name])} there and {short_repr(here[name])} here" for name in names]
    changes += changes_since(saved, data)
    if not config.learning_rate.use_checkpoint_opt_param_scheduler:
        schedule, stored = scheduler.state_dict(), saved["scheduler"]
        if any(stored.get(name, value) != value for name, value in schedule.items() if name != _POSITION):
            changes.append(
                "the schedule is another one (--use-checkpoint-opt-param-scheduler continues the stored one)"
            )
    if changes:
        raise CheckpointError(
            f"iterations after {where} must be replayed, and flags differ: {'; '.join(changes)}. Fix: resume with the "
            "flags of the snapshot, and change them after a checkpoint of --save, or pass --allow-nondeterministic",
            code="replay-not-identical",
        )
