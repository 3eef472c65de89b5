"""Derives values that follow from others and were not given.  Idempotent."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from megatron.pretraining.config.flag import UNKNOWN, Problems, UnknownValueError, refuse
from megatron.pretraining.config.layer_pattern import from_interval

DEFAULT_SPLIT = "969, 30, 1"


def installed(package: str) -> bool:
    """Whether a package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None


def derive(values: dict, problems: Problems) -> dict:
    """A copy of all values by field name, with Nones that mean "default" replaced; may contain ``UNKNOWN``."""
    result = _Values(values)
    problems.check(_refuse_both_patterns, result)
    for step in (_network, _experts, _parallel, _deepspeed, _precision, _kernels, _regularization, _data):
        problems.check(step, result)
    return dict(result)


class _Values(dict):
    """Values by field name; what follows from an unknown value is unknown."""

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if value is UNKNOWN:
            raise UnknownValueError(name)
        return value

    def derive(self, name: str, compute: Callable[[], object]) -> None:
        """Sets a value."""
        try:
            self[name] = compute()
        except UnknownValueError:
            self[name] = UNKNOWN

    def fill(self, name: str, compute: Callable[[], object]) -> None:
        """Sets a value that is None."""
        if self.get(name) is None:
            self.derive(name, compute)


def _refuse_both_patterns(v: _Values) -> None:
    refuse(
        v["expert_interval"] is not None and v["moe_layer_freq"] != 1,
        "--expert-interval and --moe-layer-freq exclude each other. Fix: drop one",
        code="flags-exclude-each-other",
    )


def _network(v: _Values) -> None:
    v.fill("ffn_hidden_size", lambda: _width(v["hidden_size"], v["swiglu"]))
    v.fill("kv_channels", lambda: _quotient(v["hidden_size"], v["num_attention_heads"]))
    v.fill("num_query_groups", lambda: 1 if v["group_query_attention"] else v["num_attention_heads"])
    v.fill("max_position_embeddings", lambda: v["seq_length"])
    v.fill("transformer_impl", lambda: "transformer_engine" if installed("transformer_engine") else "local")


def _width(hidden: int, gated: bool) -> int:
    return int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden


def _quotient(value: int, divisor: int) -> int | None:
    return None if value % divisor else value // divisor


def _experts(v: _Values) -> None:
    if v.get("expert_interval") is not None:
        v.derive("moe_layer_freq", lambda: from_interval(v["expert_interval"], v["num_layers"]))
        v["expert_interval"] = None
    if v.get("num_experts") is not None:
        v.fill("moe_token_dispatcher_type", lambda: "alltoall" if v["elastic"] else "allgather")
        v.fill("moe_ffn_hidden_size", lambda: v["ffn_hidden_size"])
    v.derive("moe_expert_capacity_factor", lambda: _unless_negative(v["moe_expert_capacity_factor"]))


def _unless_negative(factor: float | None) -> float | None:
    return None if factor is not None and factor < 0 else factor


def _parallel(v: _Values) -> None:
    v.fill("expert_tensor_parallel_size", lambda: 1 if v["elastic"] else v["tensor_model_parallel_size"])
    v.derive("sequence_parallel", lambda: v["sequence_parallel"] and v["tensor_model_parallel_size"] > 1)
    sizes = (
        "num_layers",
        "pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    )
    v.derive(
        "overlap_p2p_comm", lambda: v["overlap_p2p_comm"] and virtual_stages(*(v[size] for size in sizes)) is not None
    )


def _deepspeed(v: _Values) -> None:
    if v["deepspeed"]:
        v.fill("zero_stage", lambda: 1)


def virtual_stages(num_layers: int, pipeline: int, layers: int | None, stages: int | None) -> int | None:
    """Virtual stages that each worker alternates between, or None without an interleaved schedule.

    Args:
        num_layers: of the model.
        pipeline: stages of the pipeline.
        layers: of each virtual stage, if that is given.
        stages: virtual stages of each worker, if that is given.
    """
    if layers:
        stages = num_layers // pipeline // layers
    return stages if stages and stages > 1 else None


def _precision(v: _Values) -> None:
    by_masters = "accumulate_allreduce_grads_in_fp32"
    v.derive(by_masters, lambda: v[by_masters] or (v["bf16"] and v["main_params_dtype"] == "fp32"))
    by_scaling = "attention_softmax_in_fp32"
    v.derive(by_scaling, lambda: v[by_scaling] or v["apply_query_key_layer_scaling"])
    # the loss scale adapts by means of infinite gradients
    by_loss = "check_for_nan_in_loss_and_grad"
    v.derive(by_loss, lambda: v[by_loss] and not (v["fp16"] and v["loss_scale"] is None))
    if v["recompute_activations"]:
        v.fill("recompute_granularity", lambda: "selective")


def _kernels(v: _Values) -> None:
    gelu = not v["swiglu"] and not v["squared_relu"] and v["add_bias_linear"]
    v.derive("bias_gelu_fusion", lambda: v["bias_gelu_fusion"] and gelu and v["num_experts"] is None)
    v.derive("bias_swiglu_fusion", lambda: v["bias_swiglu_fusion"] and v["swiglu"])


def _regularization(v: _Values) -> None:
    for end in ("start_weight_decay", "end_weight_decay"):
        if v.get("weight_decay_incr_style") == "constant":
            v.fill(end, lambda: v["weight_decay"])


def _data(v: _Values) -> None:
    if v.get("data_path") or v["mock_data"]:
        v.fill("split", lambda: DEFAULT_SPLIT)
