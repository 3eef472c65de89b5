"""Defines the groups of flags, and values derived from several groups."""

from __future__ import annotations

import abc
import dataclasses
import functools
import typing
from collections.abc import Mapping

from megatron.pretraining.config.deepspeed import DeepSpeedFlags
from megatron.pretraining.config.elastic import ElasticFlags
from megatron.pretraining.config.flag import FlagGroup
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
