"""Checks across groups: flags that are valid alone and contradict each other."""

from __future__ import annotations

from megatron.pretraining.config.deepspeed_fit import check_deepspeed
from megatron.pretraining.config.derive import installed
from megatron.pretraining.config.elastic_together import check_elastic
from megatron.pretraining.config.flag import dashed, refuse, refuse_remainder
from megatron.pretraining.config.groups import FlagGroups
from moc.policy import POLICIES, JobShape


def check_together(config: FlagGroups) -> None:
    """Raises ``ConfigError`` at the first combination of flags that cannot work.

    What depends on the number of workers is checked by ``check_world``, and what depends on the machine by
    ``check_backend``.
    """
    check_elastic(config)
    _check_tensor_parallelism(config)
    _check_pipeline(config)
    _check_sequence(config)
    _check_document_borders(config)
    _check_schedule(config)
    _check_packages(config)
    _check_experts(config)
    check_own_flags(config)
    check_deepspeed(config)
    refuse(
        config.regularization.grad_norm == "stock" and (config.elastic.elastic or config.zero.deepspeed),
        "--grad-norm stock is megatron-core's norm, which --elastic and --deepspeed cannot compute: drop it.",
    )
    refuse(
        config.regularization.optimizer != "adam" and config.parallel.use_distributed_optimizer,
        f"--optimizer {config.regularization.optimizer} cannot be sharded: drop --use-distributed-optimizer.",
    )
    refuse(
        config.regularization.optimizer != "adam" and config.mixed_precision.moments,
        f"--exp-avg-dtype and --exp-avg-sq-dtype are for Adam's moments, and --optimizer "
        f"{config.regularization.optimizer} has none: drop them.",
    )
    refuse(
        config.mixed_precision.main_params_dtype == "bf16" and config.parallel.use_distributed_optimizer,
        "--main-params-dtype bf16 cannot be sharded, since megatron-core's distributed optimizer makes fp32 masters: "
        "drop --use-distributed-optimizer.",
    )


def check_own_flags(config: FlagGroups) -> None:
    """Raises ``ConfigError`` if flags of snapshots or faults contradict others."""
    _check_snapshots(config)
    refuse(
        config.faults.wanted and not config.logging.log_dir,
        "--inject and --inject-mtbf-iterations need --log-dir, which records the injected faults: add it.",
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


def _check_snapshots(config: FlagGroups) -> None:
    snapshot, save = config.snapshot, config.checkpoint.save
    refuse(
        config.checkpoint.ckpt_step is not None and not config.checkpoint.load and not snapshot.ckpt_policy,
        "--ckpt-step needs --load or --ckpt-policy: add one of them.",
    )
    refuse(
        snapshot.ckpt_policy and not (snapshot.ckpt_dir or save),
        "--ckpt-policy needs a directory for snapshots: add --ckpt-dir or --save.",
    )
    refuse(
        snapshot.upstream_logging and config.parallel.pipeline_model_parallel_size == 1,
        "--upstream-logging needs --pipeline-model-parallel-size greater than 1: raise it, or drop --upstream-logging.",
    )
    refuse(  # a tied embedding's gradient is a sum over two stages, and a stage that replays alone knows only its part
        snapshot.upstream_logging and not config.network.untie_embeddings_and_output_weights,
        "--upstream-logging replays a pipeline stage alone, which embeddings that are tied across stages do not allow: "
        "add --untie-embeddings-and-output-weights, or drop --upstream-logging.",
    )
    job = job_shape(config)
    for kind in POLICIES.values():
        for sentence in kind.misfits(snapshot, job):
            refuse(True, sentence)
    refuse(  # after the policies, since one may need memory
        config.elastic.elastic and snapshot.ckpt_policy and snapshot.ckpt_tier != "disk",
        f"--elastic keeps replicas of experts in the workers themselves: choose --ckpt-tier disk, not "
        f"{snapshot.ckpt_tier}, or drop --elastic.",
    )
    interval = int(snapshot.snapshot_interval) if snapshot.snapshot_interval.isdecimal() else None
    refuse_remainder("persist_interval", snapshot.persist_interval, "snapshot_interval", interval)


def _check_document_borders(config: FlagGroups) -> None:
    if not config.data.reset_attention_mask:
        return
    refuse(  # the mask comes with the data, which only the first and the last stage read
        config.parallel.pipeline_model_parallel_size > 2 or config.virtual_pipeline_model_parallel_size,
        "--reset-attention-mask reaches only the first and the last of the pipeline's stages: drop it, or make "
        "--pipeline-model-parallel-size at most 2 without virtual stages.",
    )
    refuse(
        config.network.transformer_impl == "transformer_engine",
        "Transformer Engine's attention is causal and takes no mask: drop --reset-attention-mask, or choose "
        "--transformer-impl local.",
    )


def _check_tensor_parallelism(config: FlagGroups) -> None:
    size = config.parallel.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "hidden_size"):
        refuse_remainder(name, getattr(config.network, name), "tensor_model_parallel_size", size)
    refuse(
        config.network.qk_layernorm_full_width and size > 1,
        "--qk-layernorm-full-width spans the heads of all workers with --tensor-model-parallel-size greater than 1: "
        "make it 1, or drop --qk-layernorm-full-width.",
    )


def _check_pipeline(config: FlagGroups) -> None:
    parallel, layers = config.parallel, config.network.num_layers
    size = parallel.pipeline_model_parallel_size
    refuse_remainder("num_layers", layers, "pipeline_model_parallel_size", size)
    per_stage = parallel.num_layers_per_virtual_pipeline_stage
    refuse(
        per_stage and layers // size % per_stage,
        f"the {layers // size} layers of a pipeline stage are not a multiple of "
        f"--num-layers-per-virtual-pipeline-stage {per_stage}: change it or --num-layers.",
    )
    stages = config.virtual_pipeline_model_parallel_size
    refuse(
        stages and layers // size % stages,
        f"the {layers // size} layers of a pipeline stage are not a multiple of "
        f"--num-virtual-stages-per-pipeline-rank {stages}: change it or --num-layers.",
    )
    refuse(
        stages and size == 2 and not parallel.overlap_p2p_comm,
        "an interleaved schedule with --pipeline-model-parallel-size 2 needs --overlap-p2p-communication: add it (or "
        "drop --no-overlap-p2p-communication).",
    )


def _check_sequence(config: FlagGroups) -> None:
    length, positions = config.data.seq_length, config.network.max_position_embeddings
    refuse(positions < length, f"--max-position-embeddings {positions} is less than --seq-length {length}: raise it.")
    refuse(
        config.parallel.sequence_parallel and length % config.parallel.tensor_model_parallel_size,
        f"--seq-length {length} is not a multiple of --tensor-model-parallel-size "
        f"{config.parallel.tensor_model_parallel_size}, as --sequence-parallel needs: change one of them.",
    )


def _check_schedule(config: FlagGroups) -> None:
    training, rate = config.training, config.learning_rate
    unit, other = ("iters", "samples") if training.train_iters is not None else ("samples", "iters")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        refuse(
            getattr(rate, f"{name}_{other}"),
            f"{dashed(name)}-{other} does not fit --train-{unit}: give {dashed(name)}-{unit}.",
        )
    total = getattr(training, f"train_{unit}")
    decay = getattr(rate, f"lr_decay_{unit}") or total
    warmup = getattr(rate, f"lr_warmup_{unit}")
    limit = f"--lr-decay-{unit}" if getattr(rate, f"lr_decay_{unit}") else f"--train-{unit}"
    refuse(warmup >= decay, f"--lr-warmup-{unit} {warmup} is not less than {limit} {decay}: shorten the warm-up.")
    if rate.lr_decay_style != "WSD":
        return
    last = getattr(rate, f"lr_wsd_decay_{unit}")
    refuse(last is None, f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}: add it.")
    refuse(last > decay, f"--lr-wsd-decay-{unit} {last} is more than {limit} {decay}: shorten the last phase.")


def _check_packages(config: FlagGroups) -> None:
    transformer_engine = installed("transformer_engine")
    refuse(
        config.network.transformer_impl == "transformer_engine" and not transformer_engine,
        "--transformer-impl transformer_engine needs Transformer Engine, which is not installed: install it or choose "
        "local.",
    )
    precision = config.mixed_precision
    by_torch = precision.fp8_format and config.network.transformer_impl == "local"
    refuse(
        by_torch and precision.fp8_recipe != "tensorwise",
        f"--fp8-recipe {precision.fp8_recipe} needs Transformer Engine: install it and choose --transformer-impl "
        "transformer_engine, or choose tensorwise.",
    )
    refuse(
        by_torch and config.moe.moe_grouped_gemm,
        "--fp8-format does not reach --moe-grouped-gemm with --transformer-impl local: drop one of them, or choose "
        "transformer_engine.",
    )
    refuse(
        config.moe.moe_permute_fusion and not transformer_engine,
        "--moe-permute-fusion needs Transformer Engine, which is not installed: drop it.",
    )
    refuse(
        config.moe.moe_grouped_gemm and not (transformer_engine or installed("grouped_gemm")),
        "--moe-grouped-gemm needs Transformer Engine or grouped_gemm, and neither is installed: drop it.",
    )
    refuse(
        config.moe.moe_token_dispatcher_type == "flex" and not installed("deep_ep"),
        "--moe-token-dispatcher-type flex needs the package deep_ep, which is not installed: choose alltoall.",
    )


def _check_experts(config: FlagGroups) -> None:
    moe, parallel = config.moe, config.parallel
    if moe.num_experts is None:
        refuse(
            parallel.expert_model_parallel_size > 1,
            "--expert-model-parallel-size has no effect without --num-experts: add it.",
        )
        return
    for name, size in (
        ("num_experts", "expert_model_parallel_size"),
        ("moe_ffn_hidden_size", "expert_tensor_parallel_size"),
        ("moe_shared_expert_intermediate_size", "tensor_model_parallel_size"),
    ):
        refuse_remainder(name, getattr(moe, name), size, getattr(parallel, size))
    refuse(
        parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel,
        "--tensor-model-parallel-size greater than 1 with --num-experts needs --sequence-parallel: add it.",
    )
    tensor, experts = parallel.tensor_model_parallel_size, parallel.expert_tensor_parallel_size
    refuse(  # megatron-core sums gradients of experts that are not distributed like those of dense layers
        experts != tensor and parallel.expert_model_parallel_size == 1 and not config.elastic.elastic,
        f"--expert-tensor-parallel-size {experts} with --tensor-model-parallel-size {tensor} needs "
        "--expert-model-parallel-size greater than 1: raise it, or make the two equal.",
    )
    refuse(
        moe.moe_token_dispatcher_type == "flex"
        and parallel.expert_tensor_parallel_size * parallel.expert_model_parallel_size == 1,
        "--moe-token-dispatcher-type flex needs --expert-model-parallel-size greater than 1: choose alltoall.",
    )
    num_layers = config.network.num_layers
    layers = moe.expert_layers(num_layers)
    refuse(
        len(layers) != num_layers,
        f"--moe-layer-freq lists {len(layers)} layers and --num-layers is {num_layers}: change one of them.",
    )
    refuse(
        not any(layers), "no layer holds experts: change --moe-layer-freq or --expert-interval, or drop --num-experts."
    )
    if config.network.add_bias_linear:
        _check_biases(config)


def _check_biases(config: FlagGroups) -> None:
    moe = config.moe
    refuse(
        config.parallel.expert_tensor_parallel_size > 1,
        "experts with biases cannot be split: add --disable-bias-linear or --expert-tensor-parallel-size 1.",
    )
    refuse(
        moe.moe_shared_expert_intermediate_size is not None,
        "--moe-shared-expert-intermediate-size needs --disable-bias-linear: add it.",
    )
    if not moe.moe_grouped_gemm:
        return
    refuse(
        config.network.transformer_impl == "local",
        "--moe-grouped-gemm with --transformer-impl local needs --disable-bias-linear: add it.",
    )
    refuse(
        config.fusion.bias_dropout_fusion,
        "--moe-grouped-gemm needs --disable-bias-linear or --no-bias-dropout-fusion: add one.",
    )
