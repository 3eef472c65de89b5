"""Defines the groups of flags, and values derived from several groups."""

from __future__ import annotations

import abc
import dataclasses
import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.pretraining.config.deepspeed import DeepSpeedFlags
from megatron.pretraining.config.flag import UNKNOWN, Flag, FlagGroup, Problems, convert_value, flag, flags_of
from megatron.pretraining.config.layer_pattern import expand
from megatron.pretraining.config.snapshot import FaultFlags, SnapshotFlags
from moc.elastic.allocation import MAX_DOMAIN_RANKS

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
    dataloader_type: str | None
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


def parse_everywhere(text: object) -> str:
    """Accepts ``auto``, or a number of slots as written."""
    word = str(text)
    if word != "auto" and not word.isdecimal():
        raise ValueError("it is a number of slots or the word auto")
    return word


@dataclass(frozen=True)
class ElasticFlags(FlagGroup):
    """Elastic training (Lazarus): replicas of experts by load, and any number of workers."""

    elastic: bool = flag(
        False,
        "Place each expert on as many workers as its load asks for, and deal micro batches so that results do not "
        "depend on the number of workers; needs --calculate-per-token-loss and --global-batch-size.",
    )
    elastic_slots: int | None = flag(
        None, "Experts of each MoE layer that a worker has room for; needed with --elastic.", limits=">= 1"
    )
    elastic_min_replicas: int = flag(
        2,
        "Minimum number of workers that hold each expert, if slots suffice: a loss of fewer workers loses no expert.",
        limits=">= 1",
    )
    elastic_everywhere: str = flag(
        "auto",
        "Slots of each worker for the hottest experts, which every worker holds; auto weighs balance against survival.",
        type=parse_everywhere,
        metavar="auto|H",
    )
    elastic_rebalance_interval: int = flag(
        200, "Iterations between checks whether other replicas would save time; 0 for no checks.", limits=">= 0"
    )
    elastic_dispatch: str = flag(
        "level",
        "Distribution of tokens. level: all workers get equally many. even: replicas of an expert get equally many.",
        choices=("level", "even"),
    )
    elastic_domain: int = flag(
        MAX_DOMAIN_RANKS,
        "Maximum number of workers of a pipeline stage that dispatch tokens to one another. More workers form domains; "
        "each domain has all experts and counts its tokens separately.",
        limits=">= 1",
    )

    def validate(self, problems: Problems) -> None:
        """Rejects flags without ``--elastic``, and ``--elastic`` without slots."""
        if self.elastic:
            self.needs(problems, "elastic", "elastic_slots")
            return
        changed = (
            spec.spelling for spec in flags_of(ElasticFlags) if vars(self).get(spec.name, spec.default) != spec.default
        )
        problems.refuse_without(tuple(changed), "--elastic")

    @property
    def everywhere(self) -> int | None:
        """Slots for the hottest experts; None if they are chosen automatically."""
        return None if self.elastic_everywhere == "auto" else int(self.elastic_everywhere)


@dataclasses.dataclass(frozen=True)
class Config(abc.ABC):
    """Every flag in force, by group."""

    network: NetworkFlags
    moe: MoeFlags
    parallel: ParallelFlags
    elastic: ElasticFlags
    zero: DeepSpeedFlags
    training: TrainingFlags
    learning_rate: LearningRateFlags
    regularization: RegularizationFlags
    mixed_precision: MixedPrecisionFlags
    data: DataFlags
    tokenizer: TokenizerFlags
    checkpoint: CheckpointFlags
    snapshot: SnapshotFlags
    faults: FaultFlags
    validation: ValidationFlags
    logging: LoggingFlags
    rng: RngFlags
    given: Mapping[str, object] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """Values given by the user and the preset; all others are defaults or derived."""

    @abc.abstractmethod
    def replace(self, group: str, **changes: object) -> Config:
        """Returns a copy with other values in one group.

        Raises:
            AttributeError: the group has no such field.
            ConfigError: the result is invalid.
        """

    @property
    @abc.abstractmethod
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Virtual stages of each worker; None without an interleaved schedule."""

    @property
    def scheduled_batch_sizes(self) -> tuple[int, ...]:
        """Global batch sizes during the run; empty without a schedule."""
        return ()

    @property
    def snapshot_dir(self) -> str | None:
        """Directory or URL of the snapshots."""
        return snapshot_dir(self.snapshot.ckpt_dir, self.checkpoint.save)

    @property
    def shards_by_blocks(self) -> bool:
        """Whether dense optimizer state is sharded in blocks with several holders, instead of by megatron-core."""
        return self.elastic.elastic and self.parallel.use_distributed_optimizer

    @property
    def needs_exact_norm(self) -> bool:
        """Whether Megatron-LM's gradient norm is unavailable: with --elastic (depends on the workers) or DeepSpeed."""
        return self.elastic.elastic or self.zero.deepspeed


def snapshot_dir(ckpt_dir: str | None, save: str | None) -> str | None:
    """Returns the directory or URL of the snapshots from the values of ``--ckpt-dir`` and ``--save``."""
    return ckpt_dir or (f"{save}/snapshots" if save else None)


@functools.cache
def group_classes() -> dict[str, type[FlagGroup]]:
    """Returns the groups by name, in the order of ``--help``."""
    hints = typing.get_type_hints(Config)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, FlagGroup)}


@functools.cache
def all_flags() -> dict[str, Flag]:
    """Returns all flags of this project by field name, which is unique across groups."""
    return {spec.name: spec for group in group_classes().values() for spec in flags_of(group)}


def converted(own: Mapping[str, object], problems: Problems) -> dict[str, Any]:
    """Returns values of our flags, by name, in the types of their fields.

    Adds a problem for each value that does not fit, which becomes ``UNKNOWN``.
    """
    values = dict[str, Any].fromkeys(own, UNKNOWN)
    for name, value in own.items():
        problems.check(lambda name=name, value=value: values.update({name: convert_value(all_flags()[name], value)}))
    if values.get("deepspeed"):
        values.setdefault("zero_stage", 1)
    return values


def group_of(kind: type[FlagGroup], values: Mapping[str, object], problems: Problems) -> FlagGroup:
    """Returns a group that consists of our flags only, and adds its problems."""
    return kind.of_values({spec.name: values.get(spec.name, spec.default) for spec in flags_of(kind)}, problems)
