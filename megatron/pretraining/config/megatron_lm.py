"""Defines the groups of Megatron-LM's arguments that this project reads, and its own flags in these groups.

A field without ``flag`` has the value of Megatron-LM's argument of the same name; its documentation is Megatron-LM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag
from megatron.pretraining.config.layer_pattern import expand

CORRECTIONS = ("expert-counters", "final-evaluation", "global-aux-loss", "vocabulary-padding")
"""Names of corrections of megatron-core: see :mod:`megatron.pretraining.model.corrections`."""


def corrections_named(text: object) -> frozenset[str]:
    """Returns the corrections in a value of ``--correct``.

    Raises:
        ValueError: a name is unknown.
    """
    named = str(text).split(",")
    if unknown := set(named) - {*CORRECTIONS, "all", "none"}:
        raise ValueError(f"{min(unknown)!r} is none of all, none, {', '.join(CORRECTIONS)}")
    return frozenset(CORRECTIONS if "all" in named else {*named} - {"none"})


@dataclass(frozen=True)
class NetworkFlags(FlagGroup):
    """The transformer without its experts."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    kv_channels: int
    group_query_attention: bool
    num_query_groups: int
    make_vocab_size_divisible_by: int
    norm_epsilon: float
    """Argument ``layernorm_epsilon``."""
    swiglu: bool
    untie_embeddings_and_output_weights: bool
    add_bias_linear: bool
    transformer_impl: str


@dataclass(frozen=True)
class MoeFlags(FlagGroup):
    """Experts, router, token dispatch."""

    num_experts: int | None
    moe_layer_freq: int | tuple[int, ...]
    moe_ffn_hidden_size: int | None
    moe_shared_expert_intermediate_size: int | None
    moe_shared_expert_gate: bool
    moe_shared_expert_overlap: bool
    moe_grouped_gemm: bool
    moe_single_grouped_weight: bool
    moe_single_grouped_bias: bool
    moe_router_topk: int
    moe_token_dispatcher_type: str | None
    moe_expert_capacity_factor: float | None
    moe_pad_expert_input_to_capacity: bool
    moe_permute_fusion: bool

    def expert_layers(self, num_layers: int) -> tuple[int, ...]:
        """Returns one entry per layer: 1 if it holds experts, 0 if it is dense."""
        return expand(self.moe_layer_freq, num_layers) if self.num_experts else (0,) * num_layers

    @property
    def drops_tokens(self) -> bool:
        """Whether experts drop tokens beyond their capacity and are not padded to it."""
        return self.moe_expert_capacity_factor is not None and not self.moe_pad_expert_input_to_capacity


@dataclass(frozen=True)
class ParallelFlags(FlagGroup):
    """How the model and its work are split over workers."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int
    context_parallel_size: int
    sequence_parallel: bool
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    ddp_bucket_size: int | None


@dataclass(frozen=True)
class TrainingFlags(FlagGroup):
    """Batches, length, exits, determinism."""

    micro_batch_size: int
    global_batch_size: int | None
    train_iters: int | None
    train_samples: int | None
    skip_train: bool
    exit_interval: int | None
    exit_duration_in_mins: int | None
    exit_signal_handler: bool
    exit_signal: str
    calculate_per_token_loss: bool
    check_for_nan_in_loss_and_grad: bool
    deterministic_mode: bool
    manual_gc: bool
    manual_gc_interval: int
    allow_nondeterministic: bool = flag(
        False,
        "Do not turn on --deterministic-mode on CUDA for policies whose recovery is exact; the run is then reported as "
        "not exact.",
    )
    correct: str = flag(
        "all",
        "Correct results of megatron-core that depend on precision or layout: all, none, or some of "
        f"{', '.join(CORRECTIONS)}, separated by commas. Scripts of Megatron-LM have the default none.",
        metavar="NAME",
        type=lambda text: (corrections_named(text), str(text))[1],
    )

    @property
    def corrections(self) -> frozenset[str]:
        """Names of the corrections of ``--correct``."""
        return corrections_named(self.correct)


@dataclass(frozen=True)
class LearningRateFlags(FlagGroup):
    """Learning rate."""

    lr: float
    min_lr: float
    override_opt_param_scheduler: bool
    use_checkpoint_opt_param_scheduler: bool


@dataclass(frozen=True)
class RegularizationFlags(FlagGroup):
    """Optimizer and regularization."""

    optimizer: str
    optimizer_cpu_offload: bool
    weight_decay: float
    grad_norm: str = flag(
        "exact",
        "Norm that gradients are clipped by: exact is a sum in float64, with the same bits in every layout; stock is "
        "Megatron-LM's in float32, the default of its scripts.",
        choices=("exact", "stock"),
    )


@dataclass(frozen=True)
class MixedPrecisionFlags(FlagGroup):
    """Number formats."""

    fp16: bool
    bf16: bool
    main_params_dtype: str
    exp_avg_dtype: str | None
    """Format of Adam's first moment; None if it is not given."""
    exp_avg_sq_dtype: str | None
    fp8_format: str | None
    fp8_recipe: str

    @property
    def moments(self) -> tuple[str, str] | None:
        """Formats of both Adam moments; None if the optimizer decides."""
        if self.exp_avg_dtype is None and self.exp_avg_sq_dtype is None:
            return None
        return self.exp_avg_dtype or "fp32", self.exp_avg_sq_dtype or "fp32"


@dataclass(frozen=True)
class DataFlags(FlagGroup):
    """Datasets and samples."""

    data_path: Sequence[str] | None
    train_data_path: Sequence[str] | None
    split: str | None
    mock_data: bool
    data_cache_path: str | None
    seq_length: int
    allow_changed_data: bool = flag(
        False,
        "Continue a run with other training data or another tokenizer than it was saved with, and accept data whose "
        "contents or tokenizer differ from PREFIX.fingerprint.json.",
    )


@dataclass(frozen=True)
class TokenizerFlags(FlagGroup):
    """Tokenizer."""

    tokenizer_type: str
    vocab_size: int | None


@dataclass(frozen=True)
class CheckpointFlags(FlagGroup):
    """Dense checkpoints."""

    save: str | None
    save_interval: int | None
    save_retain_interval: int | None
    load: str | None
    ckpt_step: int | None
    async_save: bool
    save_failure: str = flag(
        "continue",
        "When a checkpoint or snapshot cannot be saved: continue training and retry, or stop. A run whose last state "
        "is saved nowhere ends with an error either way.",
        choices=("continue", "stop"),
    )


@dataclass(frozen=True)
class ValidationFlags(FlagGroup):
    """Validation."""

    eval_interval: int | None


@dataclass(frozen=True)
class LoggingFlags(FlagGroup):
    """Logging."""

    log_params_norm: bool
    log_num_zeros_in_grad: bool
    tensorboard_dir: str | None
    log_dir: str | None = flag(None, "Directory of events.jsonl and of this run's logs.", metavar="DIR")
    mlflow_experiment: str | None = flag(
        None,
        "Experiment of MLflow that receives this run's scalars; MLFLOW_TRACKING_URI names the server.",
        metavar="NAME",
    )
    peak_tflops: float | None = flag(
        None,
        "Peak of a device in TFLOP/s, for the model FLOPs utilization (MFU). The default is the dense bf16 peak of "
        "the device's model.",
        limits="> 0",
        metavar="X",
    )
    metrics_port: int | None = flag(
        None,
        "Port of Prometheus metrics, which the first worker serves; 0 for any. For jobs without mocrun, whose flag of "
        "this name also shows nodes and workers.",
        limits=">= 0, <= 65535",
    )
    dashboard_port: int | None = flag(
        None, "Port of the page of the job, in the same way; 0 for any.", limits=">= 0, <= 65535"
    )


@dataclass(frozen=True)
class RngFlags(FlagGroup):
    """Random numbers and initialization."""

    seed: int
    initialization: str = flag(
        "exact",
        "How initial weights are drawn: exact is from the seed and the name of each weight, with the same bits in "
        "every layout; stock is Megatron-LM's, from the seed and the layout, the default of its scripts.",
        choices=("exact", "stock"),
    )
