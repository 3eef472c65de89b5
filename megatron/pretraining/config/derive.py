"""Derives values that follow from others and were not given.  Idempotent."""

from __future__ import annotations

import importlib.util

from megatron.pretraining.config.flag import refuse
from megatron.pretraining.config.layer_pattern import from_interval

DEFAULT_SPLIT = "969, 30, 1"


def installed(package: str) -> bool:
    """Whether a package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None


def derive(values: dict) -> dict:
    """A copy of all values by field name, with Nones that mean "default" replaced."""
    result = dict(values)
    for step in (_network, _experts, _parallel, _deepspeed, _precision, _kernels, _regularization, _data):
        step(result)
    return result


def _fill(values: dict, name: str, value: object) -> None:
    if values[name] is None:
        values[name] = value


def _network(v: dict) -> None:
    hidden, heads = v["hidden_size"], v["num_attention_heads"]
    if hidden is not None:
        _fill(v, "ffn_hidden_size", int(4 * hidden * 2 / 3 / 64) * 64 if v["swiglu"] else 4 * hidden)
        if heads and hidden % heads == 0:
            _fill(v, "kv_channels", hidden // heads)
    _fill(v, "num_query_groups", 1 if v["group_query_attention"] else heads)
    _fill(v, "max_position_embeddings", v["seq_length"])
    _fill(v, "transformer_impl", "transformer_engine" if installed("transformer_engine") else "local")


def _experts(v: dict) -> None:
    if v["expert_interval"] is not None and v["num_layers"] is not None:
        refuse(v["moe_layer_freq"] != 1, "--expert-interval and --moe-layer-freq exclude each other: drop one.")
        v["moe_layer_freq"] = from_interval(v["expert_interval"], v["num_layers"])
        v["expert_interval"] = None
    if v["num_experts"] is not None:
        _fill(v, "moe_token_dispatcher_type", "alltoall" if v["elastic"] else "allgather")
        _fill(v, "moe_ffn_hidden_size", v["ffn_hidden_size"])
    if v["moe_expert_capacity_factor"] is not None and v["moe_expert_capacity_factor"] < 0:
        v["moe_expert_capacity_factor"] = None


def _parallel(v: dict) -> None:
    _fill(v, "expert_tensor_parallel_size", 1 if v["elastic"] else v["tensor_model_parallel_size"])
    if v["tensor_model_parallel_size"] == 1:
        v["sequence_parallel"] = False
    if virtual_stages(v) is None:
        v["overlap_p2p_comm"] = False


def _deepspeed(v: dict) -> None:
    if v["deepspeed"]:
        _fill(v, "zero_stage", 1)


def virtual_stages(v: dict) -> int | None:
    """Virtual stages that each worker alternates between, or None without an interleaved schedule."""
    stages, layers = v["num_virtual_stages_per_pipeline_rank"], v["num_layers_per_virtual_pipeline_stage"]
    if layers and v["num_layers"]:
        stages = v["num_layers"] // v["pipeline_model_parallel_size"] // layers
    return stages if stages and stages > 1 else None


def _precision(v: dict) -> None:
    if v["bf16"] and v["main_params_dtype"] == "fp32":
        v["accumulate_allreduce_grads_in_fp32"] = True
    if v["apply_query_key_layer_scaling"]:
        v["attention_softmax_in_fp32"] = True
    if v["fp16"] and v["loss_scale"] is None:
        # the loss scale adapts by means of infinite gradients
        v["check_for_nan_in_loss_and_grad"] = False
    if v["recompute_activations"]:
        _fill(v, "recompute_granularity", "selective")


def _kernels(v: dict) -> None:
    plain_gelu = not v["swiglu"] and not v["squared_relu"]
    if not plain_gelu or not v["add_bias_linear"] or v["num_experts"] is not None:
        v["bias_gelu_fusion"] = False
    if not v["swiglu"]:
        v["bias_swiglu_fusion"] = False


def _regularization(v: dict) -> None:
    if v["weight_decay_incr_style"] == "constant":
        _fill(v, "start_weight_decay", v["weight_decay"])
        _fill(v, "end_weight_decay", v["weight_decay"])


def _data(v: dict) -> None:
    if v["data_path"] or v["mock_data"]:
        _fill(v, "split", DEFAULT_SPLIT)
