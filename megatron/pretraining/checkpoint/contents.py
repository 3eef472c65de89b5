"""Describes the contents of a checkpoint: weights, ``training_state.json``, and the flags that a replay must share.

Flags that determine gradients and updates: stored with each snapshot, and compared before a replay. A replay under
other flags computes other gradients or updates, so that its state differs from the lost state.  The schedule of
learning rates and weight decay is compared by its state, since a run may continue the stored schedule.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.pretraining.config import Config, train_samples
from megatron.pretraining.config.deterministic import is_exact, recovery_is_exact
from megatron.pretraining.config.flag import dashed
from megatron.pretraining.config.groups import group_classes
from megatron.pretraining.config.world import data_parallel_size
from megatron.pretraining.data.identity import (
    DATA,
    DataIdentity,
    changes_since,
    identity_of,
    join_phrases,
    reordered_since,
    same_words,
)
from megatron.pretraining.engine.optimizer import CommitOptimizer
from megatron.pretraining.engine.owned import get_step, members
from megatron.pretraining.model.parameters import unwrap
from moc.files.decode import parse, short_repr
from moc.runtime.collectives import first_line
from moc.runtime.job import World
from moc.state.record import Position
from moc.store.errors import CheckpointError

NORM_BEFORE_EXPERTS = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
"""Prefixes of the norm's parameter names: in layers of Transformer Engine, and in megatron-core's own."""


def described_weights(chunks: list[DistributedDataParallel]) -> dict:
    """Returns the model chunks as megatron-core's sharded state dict, under Megatron-LM's keys."""
    models = [unwrap(chunk).sharded_state_dict() for chunk in chunks]
    if len(models) == 1:
        return {"model": models[0]}
    return {f"model{i}": model for i, model in enumerate(models)}


def name_as_stored(described: dict, keys: Collection[str]) -> None:
    """Renames parameters of the norm before experts to the names in a checkpoint.

    In megatron-core, layers of Transformer Engine name them by the norm's module, and its own layers as parameters of
    the first linear layer.

    Args:
        described: result of :func:`described_weights`; changed in place.
        keys: keys of the checkpoint.
    """
    for part in nested_values(described):
        if isinstance(part, ShardedTensor) and part.key not in keys:
            candidates = (
                part.key.replace(prefix, replacement)
                for prefix, replacement in (NORM_BEFORE_EXPERTS, NORM_BEFORE_EXPERTS[::-1])
            )
            part.key = next((key for key in candidates if key in keys), part.key)


def training_state(
    config: Config,
    world: World,
    position: Position,
    optimizer: CommitOptimizer,
    scheduler: OptimizerParamScheduler,
    described: Mapping,
    data: DataIdentity | None,
) -> dict:
    """Returns the content of ``training_state.json``; ``described`` is the model's description."""
    return {
        **asdict(position),
        "optimizer": config.regularization.optimizer,
        "optimizer_step": get_step(optimizer.core),
        "optimizer_package": package_of(optimizer.core),
        "exact": is_exact(config, world.device.type == "cuda"),
        "params_dtype": _compute_format(config),
        "fp8": _products(config),
        "main_params_dtype": config.mixed_precision.main_params_dtype,
        "moments": config.mixed_precision.moments,
        "scheduler": scheduler.state_dict(),
        "grad_scaler": grad_scaler_state(optimizer),
        "grad_norm": optimizer.norm,
        "sample_order": sample_order(config, world),
        DATA: None if data is None else data.plain(),
    } | dict(described)


def grad_scaler_state(optimizer: CommitOptimizer) -> dict | None:
    """Returns fp16's loss scale and its history, as values of JSON; None without one."""
    scalers = [scaler for m in members(optimizer.core) if (scaler := getattr(m, "grad_scaler", None))]
    if not scalers:
        return None
    state = scalers[0].state_dict()
    return _to_json_values(state | ({"scale": [optimizer.loss_scale]} if "scale" in state else {}))


def restore_grad_scaler(optimizer: CommitOptimizer, saved: dict | None) -> None:
    """Restores fp16's loss scale and its history."""
    for member in members(optimizer.core):
        scaler = getattr(member, "grad_scaler", None)
        if saved and scaler:
            scaler.load_state_dict({**saved, "scale": torch.tensor(saved["scale"])})


def restore_scheduler(scheduler: OptimizerParamScheduler, saved: dict, where: object) -> None:
    """Restores the schedule of learning rate and weight decay, including its limits in parameter groups.

    Raises:
        CheckpointError: the flags define another schedule than the checkpoint ``where``.
    """
    limits = {"max_lr": scheduler.max_lr, "min_lr": scheduler.min_lr}
    scheduler.step(-scheduler.state_dict()["num_steps"])  # megatron-core adds the saved steps to the current ones
    try:
        scheduler.load_state_dict(saved)
    except AssertionError as mismatch:
        raise CheckpointError(
            f"the learning-rate schedule differs from the one in {where} ({first_line(mismatch)}). Fix: pass "
            "--use-checkpoint-opt-param-scheduler to keep the old one, --override-opt-param-scheduler for the new",
            code="schedule-differs",
        ) from None
    for group in scheduler.optimizer.param_groups:  # megatron-core's checkpoints contain the groups; snapshots do not
        for name, before in limits.items():
            if group.get(name) == before:
                group[name] = getattr(scheduler, name)
    scheduler.step(0)


def check_optimizer(config: Config, saved: Mapping, where: object, instead: str) -> None:
    """Raises ``CheckpointError`` if a checkpoint holds the state of another optimizer, or none.

    ``instead`` is the remedy that does not need the state.
    """
    optimizer, masters = config.regularization.optimizer, config.mixed_precision.main_params_dtype
    if saved["optimizer"] != optimizer:
        raise CheckpointError(
            f"{where} holds state of optimizer {saved['optimizer']}, not of {optimizer}. Fix: change --optimizer, or "
            f"{instead}",
            code="optimizer-differs",
        )
    if (saved_masters := saved.get("main_params_dtype", "fp32")) != masters:
        raise CheckpointError(
            f"{where} holds masters in {saved_masters}, not in {masters}. Fix: continue with the release that saved "
            f"it, or {instead}",
            code="optimizer-format-differs",
        )
    saved_moments, configured_moments = (
        tuple(formats or 2 * (masters,)) for formats in (saved.get("moments"), config.mixed_precision.moments)
    )
    if saved_moments != configured_moments:
        flags = "--exp-avg-dtype {} --exp-avg-sq-dtype {}"
        stored = saved.get("moments")
        remedy = f"pass {flags.format(*saved_moments)}" if stored else "drop --exp-avg-dtype and --exp-avg-sq-dtype"
        raise CheckpointError(
            f"{where} holds moments in {' and '.join(saved_moments)}, not in {' and '.join(configured_moments)}. "
            f"Fix: {remedy}",
            code="optimizer-format-differs",
        )


def package_of(core: MegatronOptimizer) -> str:
    """Returns the packages that implement an optimizer's updates: ``torch``, ``transformer_engine``, ``apex``, ..."""
    updaters = [getattr(member, "optimizer", None) for member in members(core)]
    packages = {type(updater).__module__.partition(".")[0] for updater in updaters if updater is not None}
    return ", ".join(sorted(packages))


def check_data(config: Config, data: DataIdentity | None, saved: Mapping, where: object) -> None:
    """Refuses to continue a run with other training data or another tokenizer, without ``--allow-changed-data``.

    Raises:
        CheckpointError: the data differ.
    """
    if not config.data.allow_changed_data and (changed := changes_since(saved, data)):
        raise CheckpointError(
            f"{where} was saved with other training data: {join_phrases(changed)}. Fix: restore the data and the "
            "tokenizer, or pass --allow-changed-data",
            code="data-changed",
        )


def warn_of_other_run(
    config: Config,
    world: World,
    optimizer: CommitOptimizer,
    data: DataIdentity | None,
    saved: Mapping,
    report: Callable[[str], None],
) -> None:
    """Warns if the saved run reads other data or samples in another order, or has another optimizer implementation."""
    warn_of_other_package(optimizer, saved, report)
    warn_of_other_data(data, saved, report)
    warn_of_other_samples(config, world, data, saved, report)


def warn_of_other_data(data: DataIdentity | None, saved: Mapping, report: Callable[[str], None]) -> None:
    """Warns of each split that reads other data than the saved run."""
    for split in {source.split: None for source in data.sources} if data is not None else ():
        if changed := changes_since(saved, data, split):
            report(f"WARNING: the {split} data changed: {join_phrases(changed)}")


def warn_of_other_package(optimizer: CommitOptimizer, saved: Mapping, report: Callable[[str], None]) -> None:
    """Warns if another implementation of the optimizer updated the saved state."""
    saved_package, package = saved.get("optimizer_package"), package_of(optimizer.core)
    if saved_package and package and saved_package != package:
        report(
            f"WARNING: the optimizer of {saved_package} updated the saved state, and the optimizer of {package} "
            "continues: the bits differ from a run without interruption"
        )


def check_package(config: Config, optimizer: CommitOptimizer, saved: Mapping, where: object) -> None:
    """Refuses a window whose updates were made by another implementation of the optimizer, if recovery is exact.

    Raises:
        CheckpointError: the implementations differ.
    """
    saved_package, package = saved.get("optimizer_package"), package_of(optimizer.core)
    differs = saved_package and package and saved_package != package
    if differs and recovery_is_exact(config) and not config.training.allow_nondeterministic:
        raise CheckpointError(
            f"{where} ends a window whose updates the optimizer of {saved_package} made, and this run uses {package}, "
            f"whose bits differ. Fix: resume where {saved_package} is installed, or pass --allow-nondeterministic",
            code="replay-not-identical",
        )


def check_window(config: Config, saved: Mapping, where: object) -> None:
    """Raises ``CheckpointError`` if a window was saved in another compute format than this run's."""
    formats = (saved.get("params_dtype"), saved.get("fp8")), (_compute_format(config), _products(config))
    if formats[0] != formats[1]:
        saved_format, configured_format = (
            f"{weights} with {products}" if products else weights for weights, products in formats
        )
        raise CheckpointError(
            f"{where} ends a window whose replay computes in {saved_format}, and this run computes in "
            f"{configured_format}. Fix: resume with the flags that the window was saved with, and change them after a "
            "full snapshot",
            code="replay-not-identical",
        )


def _compute_format(config: Config) -> str:
    return "bf16" if config.mixed_precision.bf16 else "fp16" if config.mixed_precision.fp16 else "fp32"


def _products(config: Config) -> str | None:
    precision = config.mixed_precision
    if precision.fp8_format is None:
        return None
    if config.network.transformer_impl == "local":  # torch's products have only one kind of scaling
        return f"tensorwise fp8 products ({precision.fp8_format}) of torch"
    return f"{precision.fp8_recipe} fp8 products ({precision.fp8_format}) of Transformer Engine"


def warn_of_other_samples(
    config: Config, world: World, data: DataIdentity | None, saved: Mapping, report: Callable[[str], None]
) -> None:
    """Warns of each setting that differs from the saved run and changes the samples, or of another order without one.

    Data at another path are the same if their contents are equal.
    """
    saved_order, saved_data, changed = saved.get("sample_order") or {}, identity_of(saved), False
    for name, value in sample_order(config, world).items():
        if name not in saved_order or saved_order[name] == value:
            continue
        if name.endswith("data_path") and same_words(saved_order[name], saved_data, value, data):
            continue
        changed = True
        report(
            f"WARNING: {name.replace('_', ' ')} was {short_repr(saved_order[name])} and is {short_repr(value)}: the "
            "order or the contents of samples change from here on, and some may be read twice or never"
        )
    if not changed and (prefixes := reordered_since(saved, data)):
        report(
            f"WARNING: the samples of {join_phrases(prefixes)} have another order than in the saved run: some may be "
            "read twice or never"
        )


def sample_order(config: Config, world: World) -> dict:
    """Returns the settings that determine samples and their order; megatron-core shuffles all epochs of a run together.

    A cyclic loader gives each data-parallel rank a part of the data, so its order depends on their number.
    """
    data = config.data
    settings = {
        "seed": config.rng.seed,
        "train_samples": train_samples(config, world.size),
        "seq_length": data.seq_length,
        "split": data.split,
        "data_path": list(data.data_path or ()),
        "train_data_path": list(data.train_data_path or ()),
        "mock_data": data.mock_data,
    }
    if config.tokenizer.tokenizer_type == "NullTokenizer":  # its end of a document is the last id
        settings["vocab_size"] = config.tokenizer.vocab_size
    settings |= _values(config, _SAMPLES)
    if settings.get("dataloader_type") == "cyclic":
        ranks = data_parallel_size(config, world.size)
        settings["micro_batch_of_all_workers"] = config.training.micro_batch_size * ranks
    return settings


def _to_json_values(state: dict) -> dict:
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


_SAMPLES = """
    dataloader_type data_sharding mid_level_dataset_surplus reset_position_ids reset_attention_mask eod_mask_loss
    dataloader_inter_document_masking allow_ambiguous_pad_tokens sft fim_data fim_rate fim_spm_rate fim_split_sample
    fim_fragment_rate fim_no_prefix fim_prefix_token fim_middle_token fim_suffix_token fim_pad_token fim_eod_token
    """.split()
"""Names of further flags that determine samples or their order."""
KEY = "repeated"
"""The key of the flags in a snapshot's state."""
_UPDATES = """
    clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum decoupled_weight_decay decoupled_lr decoupled_min_lr
    muon_momentum muon_use_nesterov muon_nesterov muon_num_ns_steps muon_scale_mode muon_extra_scale_factor
    muon_split_qkv muon_fp32_matmul_prec muon_coefficient_type muon_tp_mode muon_scalar_optimizer lion_beta1 lion_beta2
    apply_wd_to_qk_layernorm no_weight_decay_cond_type freeze_all_layers iterations_to_skip use_mup mup_width_mult
    loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis use_precision_aware_optimizer
    main_grads_dtype qk_clip qk_clip_alpha qk_clip_threshold
    """
_GRADIENTS = """
    seed micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule seq_length split mock_data
    attention_dropout hidden_dropout calculate_per_token_loss norm_epsilon layernorm_zero_centered_gamma
    apply_residual_connection_post_layernorm position_embedding_type use_rotary_position_embeddings rotary_base
    rotary_percent rotary_interleaved rotary_scaling_factor rotary_seq_len_interpolation_factor use_rope_scaling
    rope_scaling_factor rope_type no_rope_freq mrope_section yarn_original_max_position_embeddings yarn_beta_fast
    yarn_beta_slow yarn_correction_range_round_to_int mscale mscale_all_dim attention_softmax_in_fp32 softmax_type
    apply_query_key_layer_scaling qk_l2_norm attention_output_gate fp32_residual_connection window_size
    window_attn_skip_freq softmax_scale openai_gelu squared_relu quick_geglu onnx_safe activation_func_clamp_value
    glu_linear_offset transformer_impl spec attention_backend flash_attention_version use_flash_attn
    masked_softmax_fusion bias_gelu_fusion bias_swiglu_fusion bias_dropout_fusion apply_rope_fusion
    fused_residual_rmsnorm normalization te_precision_config_file dataloader_type moe_mlp_glu_interleave_size
    use_fused_weighted_squared_relu use_te_activation_func no_persist_layer_norm cross_entropy_loss_fusion
    cross_entropy_fusion_impl gradient_accumulation_fusion disable_jit_fuser batch_invariant_mode
    mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power
    fp16_lm_cross_entropy disable_bf16_reduced_precision_matmul te_rng_tracker accumulate_allreduce_grads_in_fp32
    grad_reduce_in_bf16 ddp_average_in_collective ddp_reduce_scatter_with_fp32_accumulation gradient_reduce_div_fusion
    ddp_param_name_patterns_for_fp32_local_accumulation zero_communication_dtype zero_grad_accum_dtype
    mtp_num_layers mtp_loss_scaling_factor mtp_use_repeated_layer mtp_detach_heads
    recompute_granularity recompute_method recompute_num_layers recompute_modules recompute_activations
    distribute_saved_activations moe_layer_recompute
    fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_output_proj
    first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp4 fp4_recipe
    reset_position_ids reset_attention_mask eod_mask_loss create_attention_mask_in_dataloader
    dataloader_inter_document_masking allow_ambiguous_pad_tokens fim_data fim_rate fim_spm_rate fim_split_sample
    fim_fragment_rate fim_no_prefix sft logits_load_dir logits_load_kd_loss_alpha
    moe_router_topk moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_router_dtype
    moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups
    moe_router_group_topk moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_quantile_balancing_ema
    moe_router_force_load_balancing moe_router_force_biased moe_router_fusion moe_router_padding_for_quantization
    moe_router_padding_for_fp8 moe_enable_routing_replay moe_input_jitter_eps moe_expert_capacity_factor
    moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop_policy moe_apply_probs_on_input
    moe_token_dispatcher_type moe_permute_fusion moe_grouped_gemm moe_shared_expert_overlap correct
    """
_NAMES = (*_UPDATES.split(), *_GRADIENTS.split())
_POSITION = "num_steps"
"""The part of the schedule's state that changes in a run."""


def repeated(config: Config) -> dict[str, Any]:
    """Returns the flags that determine this run's gradients and updates, by name, as values of JSON."""
    values = _values(config, _NAMES)
    if config.scheduled_batch_sizes:  # Megatron-LM derives this size, which no batch has, from the number of workers
        del values["global_batch_size"]
    return values


def _values(config: Config, names: Iterable[str]) -> dict[str, Any]:
    """Returns the flags of our groups or of Megatron-LM that a run has, by name, as values of JSON."""
    groups = [*(getattr(config, group) for group in group_classes()), getattr(config, "arguments", None)]
    values = {}
    for name in names:
        owner = next((group for group in groups if hasattr(group, name)), None)
        if owner is not None:
            values[name] = getattr(owner, name)
    return parse(json.dumps(values, default=str))


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
    if not recovery_is_exact(config) or config.training.allow_nondeterministic:
        return
    current, stored_flags = repeated(config), saved.get(KEY) or {}
    names = [name for name, value in current.items() if name in stored_flags and stored_flags[name] != value]
    changes = [
        f"{dashed(name)} is {short_repr(stored_flags[name])} there and {short_repr(current[name])} here"
        for name in names
    ]
    changes += changes_since(saved, data) or [
        f"the samples of {prefix} have another order (--train-iters, --train-samples, --seed, --seq-length, --split)"
        for prefix in reordered_since(saved, data)
    ]
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
