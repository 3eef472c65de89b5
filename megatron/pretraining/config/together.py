"""Checks across groups: flags that are valid alone and contradict each other."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from megatron.pretraining.config.deepspeed_fit import check_deepspeed
from megatron.pretraining.config.derive import installed
from megatron.pretraining.config.elastic_together import check_elastic
from megatron.pretraining.config.flag import Problems, dashed
from megatron.pretraining.config.groups import FlagGroups
from megatron.pretraining.config.snapshot import refuse_by
from moc.policy import AUTO, POLICIES, JobShape


def check_together(config: FlagGroups) -> None:
    """Raises ``ConfigError`` with all combinations of flags that cannot work.

    What depends on the number of workers is checked by ``check_world``, and what depends on the machine by
    ``check_backend``.
    """
    _run(
        config,
        check_elastic,
        _check_tensor_parallelism,
        _check_width,
        _check_pipeline,
        _check_virtual_stages,
        _check_positions,
        _check_sequence,
        _check_document_borders,
        _check_schedule,
        _check_packages,
        _check_fp8,
        _check_experts,
        _check_expert_layout,
        _check_expert_layers,
        _check_biases,
        *_OF_OWN_FLAGS,
        check_deepspeed,
        _check_optimizer,
    )


def check_own_flags(config: FlagGroups) -> None:
    """Raises ``ConfigError`` if flags of snapshots or faults contradict others, with all such problems."""
    _run(config, *_OF_OWN_FLAGS)


def _run(config: FlagGroups, *checks: Callable[[FlagGroups, Problems], None]) -> None:
    problems = Problems()
    for check in checks:
        problems.check(check, config, problems)
    problems.raise_found()


def _check_faults(config: FlagGroups, problems: Problems) -> None:
    problems.refuse(
        config.faults.wanted and not config.logging.log_dir,
        "--inject and --inject-mtbf-iterations need --log-dir, which records the injected faults. Fix: add it",
        code="flag-needs-another",
    )


def _check_optimizer(config: FlagGroups, problems: Problems) -> None:
    problems.refuse(
        config.regularization.grad_norm == "stock" and (config.elastic.elastic or config.zero.deepspeed),
        "--grad-norm stock is megatron-core's norm, which --elastic and --deepspeed cannot compute. Fix: drop it",
        code="grad-norm-unsupported",
    )
    problems.refuse(
        config.rng.initialization == "stock" and config.elastic.elastic,
        "--initialization stock draws weights for each replica, and --elastic needs equal ones. Fix: drop one of them",
        code="initialization-unsupported",
    )
    problems.refuse(
        config.regularization.optimizer != "adam" and config.parallel.use_distributed_optimizer,
        f"--optimizer {config.regularization.optimizer} cannot be sharded. Fix: drop --use-distributed-optimizer",
        code="optimizer-excludes-flag",
    )
    problems.refuse(
        config.regularization.optimizer != "adam" and config.mixed_precision.moments,
        f"--exp-avg-dtype and --exp-avg-sq-dtype are for Adam's moments, and --optimizer "
        f"{config.regularization.optimizer} has none. Fix: drop them",
        code="optimizer-excludes-flag",
    )
    problems.refuse(
        config.mixed_precision.main_params_dtype == "bf16" and config.parallel.use_distributed_optimizer,
        "--main-params-dtype bf16 cannot be sharded, since megatron-core's distributed optimizer makes fp32 masters. "
        "Fix: drop --use-distributed-optimizer",
        code="optimizer-excludes-flag",
    )


def job_shape(config: FlagGroups) -> JobShape:
    """What flags say of the job; the stages of layers, and the pipeline's bubbles, are not known yet."""
    return JobShape(
        ep=config.parallel.expert_model_parallel_size,
        optimizer=config.regularization.optimizer,
        experts_apart=not config.moe.moe_grouped_gemm,
        pp=config.parallel.pipeline_model_parallel_size,
        num_experts=config.moe.num_experts or 0,
        drops=config.moe.drops_tokens,
        elastic=config.elastic.elastic,
    )


def may_save_gradients(config: FlagGroups) -> bool:
    """Whether some policy may save gradients in place of state in this job."""
    return any(kind.may_save_gradients(config.snapshot, job_shape(config)) for kind in POLICIES.values())


def _check_directories(config: FlagGroups, problems: Problems) -> None:
    snapshot, save = config.snapshot, config.checkpoint.save
    problems.refuse(
        config.checkpoint.ckpt_step is not None and not config.checkpoint.load and not snapshot.ckpt_policy,
        "--ckpt-step needs --load or --ckpt-policy. Fix: add one of them",
        code="flag-needs-another",
    )
    problems.refuse(
        snapshot.ckpt_policy and not (snapshot.ckpt_dir or save),
        "--ckpt-policy needs a directory for snapshots. Fix: add --ckpt-dir or --save",
        code="snapshot-directory-missing",
    )


def _check_upstream_logging(config: FlagGroups, problems: Problems) -> None:
    kind = POLICIES.get(config.snapshot.ckpt_policy or "")
    if not config.snapshot.upstream_logging or kind is None or not kind.replays:
        return
    problems.refuse(
        config.parallel.pipeline_model_parallel_size == 1,
        "--upstream-logging needs --pipeline-model-parallel-size greater than 1. Fix: raise it, or drop "
        "--upstream-logging",
        code="upstream-logging-unsupported",
    )
    # a tied embedding's gradient is a sum over two stages, and a stage that replays alone knows only its part
    problems.refuse(
        not config.network.untie_embeddings_and_output_weights,
        "--upstream-logging replays one pipeline stage, and embeddings that are tied across stages do not allow that. "
        "Fix: add --untie-embeddings-and-output-weights, or drop --upstream-logging",
        code="upstream-logging-unsupported",
    )


def _check_policies(config: FlagGroups, problems: Problems) -> None:
    snapshot, job = config.snapshot, job_shape(config)
    asked = (kind for name, kind in POLICIES.items() if snapshot.ckpt_policy in (name, AUTO))
    misfits = [(kind, misfit) for kind in asked for misfit in itertools.islice(kind.misfits(snapshot, job), 1)]
    for kind, misfit in misfits:
        refuse_by(kind, misfit, problems)
    problems.refuse(  # unless the policy that needs memory does not fit itself
        not misfits and config.elastic.elastic and snapshot.ckpt_policy and snapshot.ckpt_tier != "disk",
        f"--elastic keeps replicas of experts in the workers themselves. Fix: choose --ckpt-tier disk, not "
        f"{snapshot.ckpt_tier}, or drop --elastic",
        code="elastic-excludes-flag",
    )


def _check_intervals(config: FlagGroups, problems: Problems) -> None:
    snapshot = config.snapshot
    interval = int(snapshot.snapshot_interval) if snapshot.snapshot_interval.isdecimal() else None
    problems.refuse_remainder("persist_interval", snapshot.persist_interval, "snapshot_interval", interval)


def _check_document_borders(config: FlagGroups, problems: Problems) -> None:
    if not config.data.reset_attention_mask:
        return
    problems.refuse(  # the mask comes with the data, which only the first and the last stage read
        config.parallel.pipeline_model_parallel_size > 2 or config.virtual_pipeline_model_parallel_size,
        "--reset-attention-mask reaches only the first and the last of the pipeline's stages. Fix: drop it, or make "
        "--pipeline-model-parallel-size at most 2 without virtual stages",
        code="pipeline-excludes-flag",
    )
    problems.refuse(
        config.network.transformer_impl == "transformer_engine",
        "Transformer Engine's attention is causal and takes no mask. Fix: drop --reset-attention-mask, or choose "
        "--transformer-impl local",
        code="package-excludes-flag",
    )


def _check_tensor_parallelism(config: FlagGroups, problems: Problems) -> None:
    size = config.parallel.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "hidden_size"):
        problems.refuse_remainder(name, getattr(config.network, name), "tensor_model_parallel_size", size)


def _check_width(config: FlagGroups, problems: Problems) -> None:
    problems.refuse(
        config.network.qk_layernorm_full_width and config.parallel.tensor_model_parallel_size > 1,
        "--qk-layernorm-full-width spans the heads of all workers with --tensor-model-parallel-size greater than 1. "
        "Fix: make it 1, or drop --qk-layernorm-full-width",
        code="flag-needs-another",
    )


def _check_pipeline(config: FlagGroups, problems: Problems) -> None:
    parallel, layers = config.parallel, config.network.num_layers
    size = parallel.pipeline_model_parallel_size
    problems.refuse_remainder("num_layers", layers, "pipeline_model_parallel_size", size)


def _check_virtual_stages(config: FlagGroups, problems: Problems) -> None:
    parallel, layers = config.parallel, config.network.num_layers
    size = parallel.pipeline_model_parallel_size
    if layers % size:
        return
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    problems.refuse(
        per_stage and layers // size % per_stage,
        f"the {layers // size} layers of a pipeline stage are not a multiple of "
        f"--num-layers-per-virtual-pipeline-stage {per_stage}. Fix: change it or --num-layers",
        code="layers-not-divisible",
    )
    stages = config.virtual_pipeline_model_parallel_size
    problems.refuse(
        not per_stage and stages and layers // size % stages,
        f"the {layers // size} layers of a pipeline stage are not a multiple of "
        f"--num-virtual-stages-per-pipeline-rank {stages}. Fix: change it or --num-layers",
        code="layers-not-divisible",
    )
    problems.refuse(
        stages and size == 2 and not parallel.overlap_p2p_comm,
        "an interleaved schedule with --pipeline-model-parallel-size 2 needs --overlap-p2p-communication. Fix: add it "
        "(or drop --no-overlap-p2p-communication)",
        code="pipeline-needs-flag",
    )


def _check_positions(config: FlagGroups, problems: Problems) -> None:
    length, positions = config.data.seq_length, config.network.max_position_embeddings
    problems.refuse(
        positions < length,
        f"--max-position-embeddings {positions} is less than --seq-length {length}. Fix: raise it",
        code="sequence-too-long",
    )


def _check_sequence(config: FlagGroups, problems: Problems) -> None:
    length = config.data.seq_length
    problems.refuse(
        config.parallel.sequence_parallel and length % config.parallel.tensor_model_parallel_size,
        f"--seq-length {length} is not a multiple of --tensor-model-parallel-size "
        f"{config.parallel.tensor_model_parallel_size}, as --sequence-parallel needs. Fix: change one of them",
        code="flag-not-a-multiple",
    )


def _check_schedule(config: FlagGroups, problems: Problems) -> None:
    training, rate = config.training, config.learning_rate
    unit, other = ("iters", "samples") if training.train_iters is not None else ("samples", "iters")
    total = getattr(training, f"train_{unit}")
    if total is None:
        return
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        problems.refuse(
            getattr(rate, f"{name}_{other}"),
            f"{dashed(name)}-{other} does not fit --train-{unit}. Fix: give {dashed(name)}-{unit}",
            code="training-length-unit-differs",
        )
    decay = getattr(rate, f"lr_decay_{unit}") or total
    warmup = getattr(rate, f"lr_warmup_{unit}")
    limit = f"--lr-decay-{unit}" if getattr(rate, f"lr_decay_{unit}") else f"--train-{unit}"
    problems.refuse(
        warmup >= decay,
        f"--lr-warmup-{unit} {warmup} is not less than {limit} {decay}. Fix: shorten the warm-up",
        code="warmup-too-long",
    )
    if rate.lr_decay_style != "WSD":
        return
    last = getattr(rate, f"lr_wsd_decay_{unit}")
    if last is None:
        problems.refuse(
            True, f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}. Fix: add it", code="flag-needs-another"
        )
        return
    problems.refuse(
        last > decay,
        f"--lr-wsd-decay-{unit} {last} is more than {limit} {decay}. Fix: shorten the last phase",
        code="warmup-too-long",
    )


def _check_packages(config: FlagGroups, problems: Problems) -> None:
    transformer_engine = installed("transformer_engine")
    problems.refuse(
        config.network.transformer_impl == "transformer_engine" and not transformer_engine,
        "--transformer-impl transformer_engine needs Transformer Engine, which is not installed. Fix: install it or "
        "choose local",
        code="package-missing",
    )
    problems.refuse(
        config.moe.moe_permute_fusion and not transformer_engine,
        "--moe-permute-fusion needs Transformer Engine, which is not installed. Fix: drop it",
        code="package-missing",
    )
    problems.refuse(
        config.moe.moe_grouped_gemm and not (transformer_engine or installed("grouped_gemm")),
        "--moe-grouped-gemm needs Transformer Engine or grouped_gemm, and neither is installed. Fix: drop it",
        code="package-missing",
    )
    problems.refuse(
        config.moe.moe_token_dispatcher_type == "flex" and not installed("deep_ep"),
        "--moe-token-dispatcher-type flex needs the package deep_ep, which is not installed. Fix: choose alltoall",
        code="package-missing",
    )


def _check_fp8(config: FlagGroups, problems: Problems) -> None:
    precision = config.mixed_precision
    by_torch = precision.fp8_format and config.network.transformer_impl == "local"
    problems.refuse(
        by_torch and precision.fp8_recipe not in ("tensorwise", "delayed"),
        f"--fp8-recipe {precision.fp8_recipe} needs Transformer Engine. Fix: install it and choose --transformer-impl "
        "transformer_engine, or choose tensorwise",
        code="package-missing",
    )
    problems.refuse(
        by_torch and config.moe.moe_grouped_gemm,
        "--fp8-format does not reach --moe-grouped-gemm with --transformer-impl local. Fix: drop one of them, or "
        "choose transformer_engine",
        code="fp8-excludes-flag",
    )


def _check_experts(config: FlagGroups, problems: Problems) -> None:
    moe, parallel = config.moe, config.parallel
    if moe.num_experts is None:
        problems.refuse(
            parallel.expert_model_parallel_size > 1,
            "--expert-model-parallel-size has no effect without --num-experts. Fix: add it",
            code="flag-needs-another",
        )
        return
    for name, size in (
        ("num_experts", "expert_model_parallel_size"),
        ("moe_ffn_hidden_size", "expert_tensor_parallel_size"),
        ("moe_shared_expert_intermediate_size", "tensor_model_parallel_size"),
    ):
        problems.refuse_remainder(name, getattr(moe, name), size, getattr(parallel, size))


def _check_expert_layout(config: FlagGroups, problems: Problems) -> None:
    moe, parallel = config.moe, config.parallel
    if moe.num_experts is None:
        return
    problems.refuse(
        parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel,
        "--tensor-model-parallel-size greater than 1 with --num-experts needs --sequence-parallel. Fix: add it",
        code="experts-need-flag",
    )
    tensor, experts = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    problems.refuse(  # megatron-core sums gradients of experts that are not distributed like those of dense layers
        experts != tensor and parallel.expert_model_parallel_size == 1 and not config.elastic.elastic,
        f"--expert-tensor-parallel-size {experts} with --tensor-model-parallel-size {tensor} needs "
        "--expert-model-parallel-size greater than 1. Fix: raise it, or make the two equal",
        code="expert-split-unsupported",
    )
    problems.refuse(
        moe.moe_token_dispatcher_type == "flex"
        and parallel.expert_tensor_parallel_size * parallel.expert_model_parallel_size == 1,
        "--moe-token-dispatcher-type flex needs --expert-model-parallel-size greater than 1. Fix: choose alltoall",
        code="flag-needs-another",
    )


def _check_expert_layers(config: FlagGroups, problems: Problems) -> None:
    moe = config.moe
    if moe.num_experts is None:
        return
    num_layers = config.network.num_layers
    layers = moe.expert_layers(num_layers)
    problems.refuse(
        len(layers) != num_layers,
        f"--moe-layer-freq lists {len(layers)} layers and --num-layers is {num_layers}. Fix: change one of them",
        code="layer-pattern-mismatch",
    )
    problems.refuse(
        not any(layers),
        "no layer holds experts. Fix: change --moe-layer-freq or --expert-interval, or drop --num-experts",
        code="layer-pattern-mismatch",
    )


def _check_biases(config: FlagGroups, problems: Problems) -> None:
    moe = config.moe
    if moe.num_experts is None or not config.network.add_bias_linear:
        return
    problems.refuse(
        config.parallel.expert_tensor_parallel_size > 1,
        "experts with biases cannot be split. Fix: add --disable-bias-linear or --expert-tensor-parallel-size 1",
        code="expert-biases-unsupported",
    )
    problems.refuse(
        moe.moe_shared_expert_intermediate_size is not None,
        "--moe-shared-expert-intermediate-size needs --disable-bias-linear. Fix: add it",
        code="expert-biases-unsupported",
    )
    if not moe.moe_grouped_gemm:
        return
    problems.refuse(
        config.network.transformer_impl == "local",
        "--moe-grouped-gemm with --transformer-impl local needs --disable-bias-linear. Fix: add it",
        code="expert-biases-unsupported",
    )
    problems.refuse(
        config.network.transformer_impl != "local" and config.fusion.bias_dropout_fusion,
        "--moe-grouped-gemm needs --disable-bias-linear or --no-bias-dropout-fusion. Fix: add one",
        code="expert-biases-unsupported",
    )


_OF_OWN_FLAGS = (_check_directories, _check_upstream_logging, _check_policies, _check_intervals, _check_faults)
