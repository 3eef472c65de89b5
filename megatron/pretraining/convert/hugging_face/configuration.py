"""Reads and writes the keys of transformers' ``config.json`` that all families share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron.pretraining.convert.hugging_face.family import LLAMA_LIKE, Config, Described
from moc.inspect.coverage import MAX_OPERATORS
from moc.store.errors import CheckpointError

_SIZES = {  # keys by field of Megatron-LM's options
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "moe_router_topk": "num_experts_per_tok",
    "vocab_size": "vocab_size",
}
_MAX_LAYERS = 10_000
_MAX = 1 << 40  # maximum of any size
_LONGEST = 80  # characters of a value in a message
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_ROPE = ("rope_theta", "rope_type", "type", "partial_rotary_factor")


def key_missing(key: str) -> CheckpointError:
    """Returns the error for a missing key."""
    return CheckpointError(
        f"config.json has no {key}. Fix: add it, as the model was trained",
        code="config-key-missing",
    )


def unsupported(key: str, value: object, why: str) -> CheckpointError:
    """Returns the error for a value that this program does not support."""
    return CheckpointError(
        f"config.json has {key} {_shortened_json(value)}: {why}. Fix: convert a model that has another value, or "
        "correct it if it is wrong",
        code="config-value-unsupported",
    )


def required_integer(config: Config, key: str, default: int | None = None, minimum: int = 1) -> int:
    """Returns an integer that is required unless it has a default."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise key_missing(key)
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX:
        raise unsupported(key, value, f"it must be an integer from {minimum} to {_MAX}")
    return value


def required_number(config: Config, key: str, default: float | None = None) -> float:
    """Returns a number that is required unless it has a default."""
    value = default if config.get(key) is None else config[key]
    if value is None:
        raise key_missing(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _MAX:
        raise unsupported(key, value, "it must be a number")
    return float(value)


def read_switch(config: Config, key: str, default: bool) -> bool:
    """Returns a switch; ``default`` applies if the key is absent."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, bool):
        raise unsupported(key, value, "it must be true or false")
    return value


def require_only(config: Config, key: str, expected: object, why: str) -> None:
    """Raises CheckpointError unless a key is absent or has this value."""
    if config.get(key) not in (None, expected):
        raise unsupported(key, config[key], why)


def read_common_options(
    config: Config, experts: str, fixed: dict[str, Any], theta: float = 10000.0, partial: float = 1.0
) -> dict[str, Any]:
    """Returns the fields of Megatron-LM's options that all families express identically.

    Args:
        config: contents of ``config.json``.
        experts: the key with the number of experts.
        fixed: fields that have one value in the family.
        theta: default base of the rotary frequencies.
        partial: default share of each head that is rotated.

    Raises:
        CheckpointError: the configuration is not supported.
    """
    _check(config)
    values = LLAMA_LIKE | fixed | {field: required_integer(config, key) for field, key in _SIZES.items()}
    _layers(config)
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    groups = required_integer(config, "num_key_value_heads", heads)
    base, share = _rope(config, theta, partial)
    if share != fixed.get("rotary_percent", share):
        raise unsupported("partial_rotary_factor", share, "models of this family rotate all dimensions of a head")
    values |= dict(
        kv_channels=required_integer(config, "head_dim", hidden // heads),
        group_query_attention=groups != heads,
        num_query_groups=groups,
        num_experts=_experts(config, experts, values["num_layers"]),
        norm_epsilon=required_number(config, "rms_norm_eps"),
        rotary_base=base,
        rotary_percent=share,
        untie_embeddings_and_output_weights=not read_switch(config, "tie_word_embeddings", False),
        attention_dropout=required_number(config, "attention_dropout", 0.0),
        hidden_dropout=0.0,
    )
    if config.get("router_aux_loss_coef") is not None:
        values["moe_aux_loss_coeff"] = required_number(config, "router_aux_loss_coef")
    return {name: value for name, value in values.items() if value is not None}


def write(name: str, architecture: str, model: Described, experts: str, **own: Any) -> dict[str, Any]:
    """Returns the configuration of a model: the keys that all families share, and the family's ``own``."""
    base = float(model.rotary_base)
    rope = {"rope_theta": base, "rope_type": "default"}
    if "partial_rotary_factor" in own:
        rope["partial_rotary_factor"] = own["partial_rotary_factor"]
    return {
        "architectures": [architecture],
        "model_type": name,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "max_position_embeddings": model.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": base,
        "rope_parameters": rope,
        "attention_dropout": 0.0,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        experts: model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        **own,
    }


def softmax_router(config: Config, divided: bool) -> dict[str, Any]:
    """Returns the fields of a softmax router; dividing by the sum is a softmax over only the selected experts."""
    if divided and config["num_experts_per_tok"] == 1:
        raise unsupported(
            "num_experts_per_tok", 1, "the one expert would always weigh 1, and its router could not learn"
        )
    return {"moe_router_pre_softmax": not divided}


def dense_and_sparse(config: Config) -> dict[str, Any]:
    """Returns the fields of dense layers and experts, from a list of dense layers and a step."""
    step, layers = required_integer(config, "decoder_sparse_step", 1), range(_layers(config))
    dense = {layer for layer in _items(config, "mlp_only_layers") if isinstance(layer, int)}
    return dict(
        ffn_hidden_size=required_integer(config, "intermediate_size"),
        moe_ffn_hidden_size=required_integer(config, "moe_intermediate_size"),
        moe_layer_freq=layer_freq([int(layer not in dense and (layer + 1) % step == 0) for layer in layers]),
    )


def sparse_keys(model: Described) -> dict[str, Any]:
    """Returns the inverse of :func:`dense_and_sparse`, with the keys of the router."""
    return dict(
        intermediate_size=model.ffn_hidden_size,
        moe_intermediate_size=model.moe_ffn_hidden_size,
        decoder_sparse_step=1,
        mlp_only_layers=[layer for layer, experts in enumerate(model.expert_layers) if not experts],
        norm_topk_prob=not model.moe_router_pre_softmax,
        router_aux_loss_coef=model.aux_loss_coeff,
    )


def layer_freq(layers: Sequence[int]) -> int | list[int]:
    """Returns the layers with experts in the form of ``--moe-layer-freq``."""
    if not any(layers):
        raise CheckpointError(
            "config.json has no layer with experts. Fix: convert a model with experts; others are not supported",
            code="model-without-experts",
        )
    return 1 if all(layers) else list(layers)


def no_windows(config: Config, switch: str | None = None) -> None:
    """Raises CheckpointError if attention is limited to a window; ``switch`` is the key that turns it on."""
    why = "sliding windows of attention are not supported"
    for kind in _items(config, "layer_types"):
        if kind != "full_attention":
            raise unsupported("layer_types", kind, why)
    width = required_integer(config, "sliding_window", 0, minimum=0)
    on = switch is None or read_switch(config, switch, False)
    if on and 0 < width < required_integer(config, "max_position_embeddings"):
        raise unsupported("sliding_window", width, why)


def _layers(config: Config) -> int:
    layers = required_integer(config, "num_hidden_layers")
    if layers > _MAX_LAYERS:
        raise unsupported("num_hidden_layers", layers, f"at most {_MAX_LAYERS} are supported")
    return layers


def _experts(config: Config, key: str, layers: int) -> int:
    """Returns the number of experts, also from transformers' alternative keys: Qwen3-MoE has used two."""
    numbers = {required_integer(config, name) for name in (key, *_EXPERTS) if config.get(name) is not None}
    if len(numbers) > 1:
        raise CheckpointError(
            f"config.json has different numbers of experts ({', '.join(_EXPERTS)}). Fix: drop one of them",
            code="config-contradictory",
        )
    experts = numbers.pop() if numbers else required_integer(config, key)
    if experts * layers > MAX_OPERATORS:
        raise unsupported(key, experts, f"at most {MAX_OPERATORS} experts in all layers are supported")
    return experts


def _check(config: Config) -> None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise unsupported("hidden_act", config["hidden_act"], "feed-forward layers must be gated by silu")
    require_only(config, "quantization_config", None, "quantised weights are not supported, convert them first")
    why = "layers that predict further tokens (MTP) are not supported: set it to 0, and remove their weights"
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        require_only(config, key, 0, why)


def _rope(config: Config, theta: float, partial: float) -> tuple[int, float]:
    """Returns the base of the rotary frequencies and the rotated share of each head, from either form."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key), dict | None):
            raise unsupported(key, config[key], "it must be an object")
        for name, value in (config.get(key) or {}).items():
            kind = name in ("type", "rope_type")
            if isinstance(value, dict) or name not in _ROPE or (kind and value != "default"):
                raise unsupported(key, {name: value}, "scaled rotary frequencies are not supported")
    sections = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}, config
    values = []
    for key, default in (("rope_theta", theta), ("partial_rotary_factor", partial)):
        values_of_key = {required_number(section, key) for section in sections if section.get(key) is not None}
        if len(values_of_key) > 1:
            raise CheckpointError(
                f"config.json has {key} twice, with different values. Fix: drop one of them",
                code="config-contradictory",
            )
        values.append(values_of_key.pop() if values_of_key else default)
    base, share = values
    if not base.is_integer():
        raise unsupported("rope_theta", base, "only integers are supported")
    return int(base), share


def _items(config: Config, key: str) -> list:
    value = config.get(key)
    if not isinstance(value, list | None):
        raise unsupported(key, value, "it must be a list")
    return value or []


def _shortened_json(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
