"""Describes a family of models in transformers: the names of its tensors and settings, and the models it can express.

A file in ``families`` has one :class:`Family` as ``FAMILY``.  A *model* here is a mapping to values from the fields of
``NetworkFlags`` and ``MoeFlags``, as flags, presets and checkpoints name them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from moc.files import decode
from moc.store.errors import CheckpointError

Model = Mapping[str, Any]
"""Values by the names of flags' fields, and ``vocab_size``, rows of the embedding without padding."""
Config = Mapping[str, Any]
"""Contents of ``config.json``."""


def no_shared_experts(model: Model) -> int:
    """Returns the inner width of shared experts in families without shared experts: 0."""
    return 0


@dataclass(frozen=True)
class Family:
    """Family of models in transformers.

    Attributes:
        name: its ``model_type``.
        architecture: the class in ``architectures``.
        flags_of: converts a configuration to a model; raises CheckpointError with the key if it is unsupported.
        config_of: converts a model to a configuration; raises CheckpointError with the flag if it is unsupported.
        moe: the module with router and experts, within a layer.
        gate, up, down: an expert's matrices.
        shared: the module of shared experts within ``moe``; "" if the family has none.
        shared_gate: whether shared experts have a gate.
        expert_bias: whether the router has a bias for each expert; zeros if the model has none.
        shared_width: inner width of the shared experts that ``config_of`` declares for a model, 0 for none.  If the
            model has no shared experts and this is not 0, all their tensors are zeros.
        ungated_down: factor for a model without a gate of shared experts, in a family with one.  ``down`` is the
            model's matrix times this factor, and the gate is zeros: the sigmoid of 0 is a half.
    """

    name: str
    architecture: str
    flags_of: Callable[[Config], dict[str, Any]]
    config_of: Callable[[Model], dict[str, Any]]
    moe: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = ""
    shared_gate: bool = False
    expert_bias: bool = False
    shared_width: Callable[[Model], int] = no_shared_experts
    ungated_down: float = 1.0


_Size = Annotated[int, Meta(ge=1, le=1 << 40)]
_Layers = Annotated[int, Meta(ge=1, le=10_000)]
_Text = Annotated[str, Meta(max_length=100)]

FULL_WIDTH = ("megatron.pretraining.model.full_width", "layer_spec")
"""Value of ``--spec`` for layers that normalize the queries, and the keys, of all heads together."""
LLAMA_LIKE: dict[str, Any] = dict(
    normalization="RMSNorm",
    swiglu=True,
    squared_relu=False,
    add_bias_linear=False,
    position_embedding_type="rope",
    rotary_interleaved=False,
    moe_expert_capacity_factor=None,
)
"""Options that are equal in all families."""
SOFTMAX: dict[str, Any] = dict(
    moe_router_score_function="softmax", moe_router_topk_scaling_factor=None, moe_router_num_groups=None
)
"""Options that are equal in families with a softmax router."""
_OF_NO_FAMILY = {
    **dict.fromkeys(
        """
        multi_latent_attention mtp_num_layers window_size qk_l2_norm use_rope_scaling no_rope_freq moe_latent_size
        rotary_seq_len_interpolation_factor hybrid_layer_pattern apply_layernorm_1p layernorm_zero_centered_gamma
        openai_gelu quick_geglu activation_func_clamp_value experimental_attention_variant linear_attention_freq
        heterogeneous_layers_config_path attention_output_gate apply_residual_connection_post_layernorm
        moe_apply_probs_on_input use_mup moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size
        """.split()
    ),
    "softmax_type": "vanilla",
    "glu_linear_offset": 0,
}
"""Required values of options that no family supports otherwise; None means not given."""


@dataclass(frozen=True)
class Described:
    """Model in Megatron-LM's derived options, without options that have no effect.

    Attributes:
        vocab_size: rows of the embedding without padding.
    """

    num_layers: _Layers
    hidden_size: _Size
    ffn_hidden_size: _Size
    num_attention_heads: _Size
    vocab_size: _Size
    max_position_embeddings: _Size
    kv_channels: _Size = 0
    group_query_attention: bool = False
    num_query_groups: _Size = 0
    position_embedding_type: _Text = "learned_absolute"
    rotary_base: _Size = 10000
    rotary_percent: Annotated[float, Meta(gt=0, le=1)] = 1.0
    rotary_interleaved: bool = False
    normalization: _Text = "LayerNorm"
    norm_epsilon: Annotated[float, Meta(gt=0, le=1)] = 1e-5
    swiglu: bool = False
    squared_relu: bool = False
    untie_embeddings_and_output_weights: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    spec: tuple[_Text, ...] | None = None
    num_experts: _Size | None = None
    moe_layer_freq: _Size | tuple[Literal[0, 1], ...] = 1
    moe_ffn_hidden_size: _Size | None = None
    moe_shared_expert_intermediate_size: _Size | None = None
    moe_shared_expert_gate: bool = False
    moe_router_load_balancing_type: _Text | tuple[_Text, ...] = "aux_loss"
    moe_router_score_function: _Text = "softmax"
    moe_router_topk: _Size = 2
    moe_router_pre_softmax: bool = False
    moe_router_topk_scaling_factor: float | None = None
    moe_router_num_groups: _Size | None = None
    moe_router_group_topk: _Size | None = None
    moe_router_enable_expert_bias: bool = False
    moe_aux_loss_coeff: float | tuple[float, ...] = 0.0
    moe_expert_capacity_factor: float | None = None

    @property
    def shared(self) -> int:
        """Inner width of the shared experts; 0 without shared experts."""
        return self.moe_shared_expert_intermediate_size or 0

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """One entry per layer: 1 with experts, 0 dense."""
        if self.num_experts is None:
            return (0,) * self.num_layers
        if isinstance(self.moe_layer_freq, int):
            return tuple(int(layer % self.moe_layer_freq == 0) for layer in range(self.num_layers))
        return self.moe_layer_freq

    @property
    def aux_loss_coeff(self) -> float:
        """Weight of the load-balancing loss; of several weights, the first."""
        weights = self.moe_aux_loss_coeff
        return weights if isinstance(weights, (int, float)) else next(iter(weights), 0.0)


def described_model(model: Model) -> Described:
    """Reads a model, also from values as JSON represents them.

    Raises:
        CheckpointError: values are missing or contradict each other, or no family supports an option.
    """
    values = {name: value for name, value in model.items() if value is not None}
    # Megatron-LM's argument for --norm-epsilon
    values.setdefault("norm_epsilon", values.get("layernorm_epsilon", 1e-5))
    if values.get("qk_layernorm_full_width"):  # option of an earlier version
        values["spec"] = FULL_WIDTH
    for name, usual in _OF_NO_FAMILY.items():
        if (value := values.get(name)) not in (usual, None, False):
            _refuse(True, f"no family can express --{name.replace('_', '-')} {str(value)[:80]}")
    try:
        described = decode.convert(_derived(values), Described)
        layers = len(described.expert_layers)
        if layers != described.num_layers:
            raise ValueError(f"it has {described.num_layers} layers, and its moe_layer_freq lists {layers}")
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"the model that the checkpoint describes is none: {error}. Fix: correct its description, or convert "
            "another checkpoint",
            code="model-description-invalid",
        ) from None
    return described


def check_options(name: str, model: Described, fixed: dict[str, Any]) -> None:
    """Raises CheckpointError unless the model's options have the values that all models of a family share."""
    _refuse(not any(model.expert_layers), f"{name} has experts, and a model without --num-experts has none")
    for option, expected in ({"spec": None} | LLAMA_LIKE | fixed).items():
        value = getattr(model, option)
        _refuse(value != expected, f"{name} cannot express {_describe_option(option, value, expected)}")
    balancing = model.moe_router_load_balancing_type
    for kind in (balancing,) if isinstance(balancing, str) else balancing:
        _refuse(
            kind in ("sinkhorn", "quantile_balancing"),
            f"{name} cannot express --moe-router-load-balancing-type {kind}, which chooses experts in another way",
        )


def check_all_layers_have_experts(name: str, model: Described) -> None:
    """Raises CheckpointError if a layer is dense."""
    _refuse(not all(model.expert_layers), f"{name} has experts in every layer: --moe-layer-freq must be 1")


def _refuse(wrong: object, sentence: str) -> None:
    if wrong:
        raise CheckpointError(f"{sentence}. Fix: choose another --family", code="family-cannot-express")


def _describe_option(option: str, value: object, expected: object) -> str:
    if option == "add_bias_linear":
        return f"a model {'without' if value else 'with'} --disable-bias-linear"
    spelling = f"--{option.replace('_', '-')}"
    if isinstance(value, bool):
        return f"a model {'with' if value else 'without'} {spelling}"
    value, expected = (" ".join(part) if isinstance(part, tuple) else part for part in (value, expected))
    return f"{spelling} {value}{'' if expected is None else f', only {expected}'}"


def _derived(options: Mapping[str, Any]) -> dict[str, Any]:
    """Fills in widths; drops options without effect: a factor of one, and groups that are all selected."""
    values = dict(options)
    hidden, heads = values.get("hidden_size"), values.get("num_attention_heads")
    if "kv_channels" not in values and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        values["kv_channels"] = hidden // heads
    if not values.get("group_query_attention"):
        values["num_query_groups"] = heads
    if values.get("num_experts") is not None:
        values.setdefault("moe_ffn_hidden_size", values.get("ffn_hidden_size"))
    if values.get("moe_router_topk_scaling_factor") == 1:
        del values["moe_router_topk_scaling_factor"]
    if values.get("moe_router_num_groups") == values.get("moe_router_group_topk"):
        values["moe_router_num_groups"] = values["moe_router_group_topk"] = None
    return values
