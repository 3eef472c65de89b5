"""Defines the groups of flags, and values derived from several groups."""

from __future__ import annotations

import abc
import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.pretraining.config.deepspeed import DeepSpeedFlags
from megatron.pretraining.config.flag import FlagGroup, Problems, flag, flags_of
from megatron.pretraining.config.megatron_lm import (
    CheckpointFlags,
    DataFlags,
    LearningRateFlags,
    LoggingFlags,
    MixedPrecisionFlags,
    MoeFlags,
    NetworkFlags,
    ParallelFlags,
    RegularizationFlags,
    RngFlags,
    TokenizerFlags,
    TrainingFlags,
    ValidationFlags,
)
from megatron.pretraining.config.snapshot import FaultFlags, SnapshotFlags
from moc.elastic.allocation import MAX_DOMAIN_RANKS


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
class FlagGroups(abc.ABC):
    """Flags in force, by group."""

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
    hints = typing.get_type_hints(FlagGroups)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, FlagGroup)}
