"""The GPT-MoE model: megatron-core's modules, configured by the flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.pretraining.config import Config
from megatron.pretraining.config.derive import installed
from megatron.pretraining.elastic.gradients import ElasticDataParallel
from megatron.pretraining.elastic.groups import gradient_groups
from megatron.pretraining.elastic.layer import elastic_layers, with_slots
from megatron.pretraining.elastic.placing import Plans, adopt
from megatron.pretraining.engine.zero.chunk import ZeroChunk
from megatron.pretraining.model import fp8
from megatron.pretraining.model.full_width import normalize_full_width
from megatron.pretraining.model.initial import EXACT, initialize_weights
from megatron.pretraining.process import cpu

ModelProvider = Callable[[Config, TransformerConfig, int, int | None], MegatronModule]


def build_model(
    config: Config, vocab_size: int, provider: ModelProvider, plans: Plans | None = None
) -> list[DistributedDataParallel]:
    """Builds this worker's model chunks with ``provider``, initialised and wrapped for data parallelism.

    With ``--elastic``, ``plans`` say which experts this worker holds.

    Returns:
        One chunk, or one per virtual stage with an interleaved schedule.  All share one ``TransformerConfig`` as
        ``chunk.config``.  With DeepSpeed it is a :class:`ZeroChunk`, which has the same interface.
    """
    core_config = transformer_config(config)
    stages = config.virtual_pipeline_model_parallel_size
    chunks = [provider(config, core_config, vocab_size, v if stages else None) for v in range(stages or 1)]
    for chunk in chunks:
        chunk.to(cpu.device())
        mend_experts(chunk)
        if plans is not None and (layers := elastic_layers([chunk])):
            adopt(layers, plans[parallel_state.get_pipeline_model_parallel_rank()], config.elastic.elastic_dispatch)
        if config.mixed_precision.fp8_format and config.network.transformer_impl == "local":
            fp8.multiply_in_8_bits(chunk, config.mixed_precision.fp8_format)
        if config.rng.initialization == EXACT:
            initialize_weights(chunk, config.rng.seed)
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if config.mixed_precision.fp16 or config.mixed_precision.bf16:
        chunks = [Float16Module(core_config, chunk) for chunk in chunks]
    if config.zero.deepspeed:
        return cast(list[DistributedDataParallel], [ZeroChunk(core_config, chunk) for chunk in chunks])
    ddp_config = data_parallel_config(config)
    wrapper = DistributedDataParallel if plans is None else ElasticDataParallel
    groups = gradient_groups(config)
    wrapped = [
        wrapper(core_config, ddp_config, chunk, disable_bucketing=i > 0, pg_collection=groups)
        for i, chunk in enumerate(chunks)
    ]
    _let_schedule_overlap_communication(core_config, ddp_config, wrapped)
    return wrapped


def build_gpt(config: Config, core_config: TransformerConfig, vocab_size: int, stage: int | None) -> GPTModel:
    """Builds one bare chunk of the model; ``stage`` is its virtual pipeline stage or None."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    network = config.network
    layers: Any = layer_specs(config, core_config, stage)  # a block specification, missing in GPTModel's annotation
    positions: Any = network.position_embedding_type  # limited to GPTModel's literals by the flag's choices
    return GPTModel(
        core_config,
        layers,
        vocab_size=vocab_size,
        max_sequence_length=network.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not network.untie_embeddings_and_output_weights,
        position_embedding_type=positions,
        rotary_percent=network.rotary_percent,
        rotary_base=network.rotary_base,
        vp_stage=stage,
    )


def layer_specs(config: Config, core_config: TransformerConfig, stage: int | None = None) -> TransformerBlockSubmodules:
    """megatron-core's layer specification: Transformer Engine's modules, or its local ones."""
    spec = get_gpt_decoder_block_spec(
        core_config,
        use_transformer_engine=core_config.transformer_impl == "transformer_engine",
        normalization=config.network.normalization,
        vp_stage=stage,
    )
    if core_config.transformer_impl == "local":
        _replace_torch_norm(spec)
    if config.network.qk_layernorm_full_width:
        normalize_full_width(spec.layer_specs, core_config)
    if slots := config.elastic.elastic_slots:
        with_slots(spec, min(slots, config.moe.num_experts or slots))
    return spec


class Norm:
    """Builds torch's LayerNorm or RMSNorm, with sequence parallelism, which ``WrappedTorchNorm`` does not support."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **ignored):
        """Returns the torch module, its parameters marked for the tensor-parallel gradient sum."""
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        return _marked(kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype), config)


def _marked(norm: torch.nn.Module, config: TransformerConfig) -> torch.nn.Module:
    for parameter in norm.parameters():
        marked: Any = parameter
        marked.sequence_parallel = config.sequence_parallel
    return norm


def _replace_torch_norm(spec: Any) -> None:
    if spec.layer_norm is WrappedTorchNorm:
        spec.layer_norm = Norm
    for layer in spec.layer_specs:
        parts = [layer.submodules]
        attention = layer.submodules.self_attention
        if isinstance(attention, ModuleSpec):
            parts.append(attention.submodules)
        for part in parts:
            for name, value in vars(part).items():
                if value is WrappedTorchNorm:
                    setattr(part, name, Norm)


def mend_experts(chunk: torch.nn.Module) -> None:
    """Repairs megatron-core's handling of experts with biases.

    Without other workers, the experts' linear layers pass through one-worker collectives, and autograd rejects the
    in-place addition of the bias to their output.  With tensor parallelism, the biases of different experts are treated
    as replicas of one: their gradients are summed, and counted once in the norm.  The dispatcher communicates for the
    experts; their linear layers, which are never split if they have biases, need no communication.
    """
    for layer in chunk.modules():
        module: Any = layer
        if getattr(module, "is_expert", False) and hasattr(module, "explicit_expert_comm"):
            module.explicit_expert_comm = True
            if getattr(module, "bias", None) is not None:
                module.bias.sequence_parallel = False
                module.bias.tensor_model_parallel = True  # not a replica: each worker's bias counts in the norm


def transformer_config(config: Config) -> TransformerConfig:
    """Translates the flags into megatron-core's ``TransformerConfig``."""
    return TransformerConfig(
        **_network_fields(config),
        **_expert_fields(config),
        **_parallel_fields(config),
        **_precision_fields(config),
        **_fusion_fields(config),
        **_recompute_fields(config),
    )


def _network_fields(config: Config) -> dict:
    network, regularization = config.network, config.regularization
    return dict(
        num_layers=network.num_layers,
        hidden_size=network.hidden_size,
        ffn_hidden_size=network.ffn_hidden_size,
        num_attention_heads=network.num_attention_heads,
        num_query_groups=network.num_query_groups if network.group_query_attention else None,
        kv_channels=network.kv_channels,
        normalization=network.normalization,
        layernorm_epsilon=network.norm_epsilon,
        add_bias_linear=network.add_bias_linear,
        add_qkv_bias=network.add_qkv_bias,
        qk_layernorm=network.qk_layernorm,
        rotary_interleaved=network.rotary_interleaved,
        gated_linear_unit=network.swiglu,
        activation_func=_activation(config),
        hidden_dropout=regularization.hidden_dropout,
        attention_dropout=regularization.attention_dropout,
        init_method_std=config.rng.init_method_std,
        use_cpu_initialization=config.training.use_cpu_initialization,
        deterministic_mode=config.training.deterministic_mode,
        calculate_per_token_loss=config.training.calculate_per_token_loss,
        transformer_impl=config.network.transformer_impl,
        attention_backend=AttnBackend[network.attention_backend],
    )


def _activation(config: Config):
    if config.network.swiglu:
        return F.silu
    if config.network.squared_relu:
        return lambda x: torch.pow(F.relu(x), 2)
    return F.gelu


def _expert_fields(config: Config) -> dict:
    moe = config.moe
    if moe.num_experts is None:
        return {}
    return dict(
        num_moe_experts=moe.num_experts,
        moe_layer_freq=moe.moe_layer_freq if isinstance(moe.moe_layer_freq, int) else list(moe.moe_layer_freq),
        moe_ffn_hidden_size=moe.moe_ffn_hidden_size or config.network.ffn_hidden_size,
        moe_shared_expert_intermediate_size=moe.moe_shared_expert_intermediate_size,
        moe_shared_expert_gate=moe.moe_shared_expert_gate,
        moe_shared_expert_overlap=moe.moe_shared_expert_overlap,
        moe_grouped_gemm=moe.moe_grouped_gemm,
        moe_router_load_balancing_type=moe.moe_router_load_balancing_type,
        moe_router_dtype=moe.moe_router_dtype,
        moe_router_score_function=moe.moe_router_score_function,
        moe_router_topk=moe.moe_router_topk,
        moe_router_pre_softmax=moe.moe_router_pre_softmax,
        moe_router_topk_scaling_factor=moe.moe_router_topk_scaling_factor,
        moe_router_num_groups=moe.moe_router_num_groups,
        moe_router_group_topk=moe.moe_router_group_topk,
        moe_router_enable_expert_bias=moe.moe_router_enable_expert_bias,
        moe_router_bias_update_rate=moe.moe_router_bias_update_rate,
        moe_router_quantile_balancing_ema=moe.moe_router_quantile_balancing_ema,
        moe_aux_loss_coeff=moe.moe_aux_loss_coeff,
        moe_z_loss_coeff=moe.moe_z_loss_coeff,
        moe_input_jitter_eps=moe.moe_input_jitter_eps,
        moe_token_dispatcher_type=moe.moe_token_dispatcher_type,
        moe_expert_capacity_factor=moe.moe_expert_capacity_factor,
        moe_pad_expert_input_to_capacity=moe.moe_pad_expert_input_to_capacity,
        moe_token_drop_policy=moe.moe_token_drop_policy,
    )


def _parallel_fields(config: Config) -> dict:
    parallel, stages = config.parallel, config.virtual_pipeline_model_parallel_size
    return dict(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=stages,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        sequence_parallel=config.parallel.sequence_parallel,
        overlap_p2p_comm=config.overlaps_p2p,
        batch_p2p_comm=not config.overlaps_p2p,
        # NCCL's sends hold their memory until they are done, gloo's do not
        deallocate_pipeline_outputs=torch.cuda.is_available(),
    )


def compute_dtype(config: Config) -> torch.dtype:
    """The dtype of the compute weights and of the tensors between pipeline stages."""
    precision = config.mixed_precision
    return torch.bfloat16 if precision.bf16 else torch.float16 if precision.fp16 else torch.float32


def _precision_fields(config: Config) -> dict:
    precision, dtype = config.mixed_precision, compute_dtype(config)
    return dict(
        fp16=precision.fp16,
        bf16=precision.bf16,
        fp8=precision.fp8_format if config.network.transformer_impl == "transformer_engine" else None,
        fp8_recipe=precision.fp8_recipe,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        fp32_residual_connection=precision.fp32_residual_connection,
        attention_softmax_in_fp32=precision.attention_softmax_in_fp32,
        apply_query_key_layer_scaling=precision.apply_query_key_layer_scaling,
    )


def _fusion_fields(config: Config) -> dict:
    """Fused kernels, where available; the CPU has none."""
    fusion, moe = config.fusion, config.moe
    if not torch.cuda.is_available():
        off = ("bias_activation", "bias_dropout", "masked_softmax", "gradient_accumulation")
        return {f"{name}_fusion": False for name in off} | dict(apply_rope_fusion=False, moe_permute_fusion=False)

    gelu_or_swiglu = not config.network.squared_relu
    return dict(
        bias_activation_fusion=gelu_or_swiglu
        and (fusion.bias_swiglu_fusion if config.network.swiglu else fusion.bias_gelu_fusion),
        bias_dropout_fusion=fusion.bias_dropout_fusion,
        masked_softmax_fusion=fusion.masked_softmax_fusion and installed("scaled_upper_triang_masked_softmax_cuda"),
        gradient_accumulation_fusion=fusion.gradient_accumulation_fusion
        and not config.zero.deepspeed  # it writes where DeepSpeed's hooks do not look
        and installed("fused_weight_gradient_mlp_cuda"),
        apply_rope_fusion=fusion.apply_rope_fusion and config.network.transformer_impl == "transformer_engine",
        moe_permute_fusion=moe.moe_permute_fusion,
    )


def _recompute_fields(config: Config) -> dict:
    training = config.training
    return dict(
        recompute_granularity=training.recompute_granularity,
        recompute_method=training.recompute_method,
        recompute_num_layers=training.recompute_num_layers,
    )


def data_parallel_config(config: Config) -> DistributedDataParallelConfig:
    """Translates the flags into the configuration of megatron-core's data-parallel wrapper."""
    parallel = config.parallel
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.mixed_precision.accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        use_distributed_optimizer=parallel.use_distributed_optimizer and not config.shards_by_blocks,
        bucket_size=parallel.ddp_bucket_size,
        # the vote detects non-finite gradients, on all ranks at once (step.py)
        check_for_nan_in_grad=False,
    )


def _let_schedule_overlap_communication(core_config, ddp_config, chunks) -> None:
    """Gives the schedule the hooks that it calls around the last micro batch."""
    if ddp_config.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in chunks]
        core_config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
