"""All groups together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import yaml

from megatron.pretraining.config.checkpoint import CheckpointFlags
from megatron.pretraining.config.convert import convert
from megatron.pretraining.config.data import DataFlags
from megatron.pretraining.config.derive import derive, virtual_stages
from megatron.pretraining.config.faults import FaultFlags
from megatron.pretraining.config.flag import Flag, FlagGroup, flags_of
from megatron.pretraining.config.fusion import CompatibilityFlags, FusionFlags
from megatron.pretraining.config.learning_rate import LearningRateFlags
from megatron.pretraining.config.logging import LoggingFlags, ValidationFlags
from megatron.pretraining.config.mixed_precision import MixedPrecisionFlags
from megatron.pretraining.config.moe import MoeFlags
from megatron.pretraining.config.network import NetworkFlags
from megatron.pretraining.config.parallel import ParallelFlags
from megatron.pretraining.config.regularization import RegularizationFlags
from megatron.pretraining.config.rng import RngFlags
from megatron.pretraining.config.snapshot import SnapshotFlags
from megatron.pretraining.config.together import check_together
from megatron.pretraining.config.tokenizer import TokenizerFlags
from megatron.pretraining.config.training import TrainingFlags


@dataclasses.dataclass(frozen=True)
class Config:
    """Every flag in force, by group.  Made by ``parse_config`` or ``compose``."""

    network: NetworkFlags
    moe: MoeFlags
    parallel: ParallelFlags
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
    fusion: FusionFlags
    compatibility: CompatibilityFlags
    model: str | None = None
    """Name of the preset that values were taken from."""
    given: Mapping[str, object] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    """What the user and the preset said; every other value is a default or follows from these."""

    @property
    def virtual_pipeline_model_parallel_size(self) -> int | None:
        """Stages that each worker alternates between, or None without an interleaved schedule."""
        return virtual_stages({**vars(self.parallel), "num_layers": self.network.num_layers})

    @property
    def snapshot_dir(self) -> str | None:
        """Directory or URL of the snapshots."""
        save = self.checkpoint.save
        return self.snapshot.ckpt_dir or (f"{save}/snapshots" if save else None)

    @property
    def sequence_parallel(self) -> bool:
        """Whether sequences are split between tensor-parallel workers."""
        return self.parallel.sequence_parallel

    @property
    def transformer_impl(self) -> str:
        """Whose layers: ``local`` or ``transformer_engine``."""
        return self.network.transformer_impl

    @property
    def num_moe_layers(self) -> int:
        """Layers whose feed-forward part is a mixture of experts."""
        frequency, layers = self.moe.moe_layer_freq, self.network.num_layers
        if self.moe.num_experts is None:
            return 0
        return -(-layers // frequency) if isinstance(frequency, int) else sum(frequency)

    def replace(self, group: str, **changes: object) -> Config:
        """A copy with other values in one group, derived and checked anew.

        For example ``config.replace("training", train_iters=3)``.

        Raises:
            AttributeError: the group has no such field.
            ConfigError: the result cannot work.
        """
        for name in changes:
            getattr(getattr(self, group), name)
        return compose({**self.given, **changes}, self.model)

    def to_dict(self) -> dict:
        """Plain values by group, as YAML or JSON holds them."""
        groups = {name: _plain(getattr(self, name)) for name in group_classes()}
        return {"model": self.model, **groups}

    def to_yaml(self) -> str:
        """The text of ``--print-config``, which ``--config`` reads again."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def compose(given: Mapping[str, object], model: str | None = None) -> Config:
    """Defaults, overridden by the values given by field name, then derived and checked.

    Raises:
        ConfigError: a value or a combination cannot work.
    """
    flags = all_flags()
    values = {name: flag.default for name, flag in flags.items()}
    values.update((name, convert(flags[name], value)) for name, value in given.items())
    values = derive(values)
    groups = {
        name: group(**{flag.name: values[flag.name] for flag in flags_of(group)})
        for name, group in group_classes().items()
    }
    config = Config(**groups, model=model, given=dict(given))
    check_together(config)
    return config


@functools.cache
def group_classes() -> dict[str, type[FlagGroup]]:
    """The groups by name, in the order of ``--help``."""
    hints = {field.name: globals().get(field.type) for field in dataclasses.fields(Config)}
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and issubclass(hint, FlagGroup)}


@functools.cache
def all_flags() -> dict[str, Flag]:
    """All flags by field name, which is unique across groups."""
    return {flag.name: flag for group in group_classes().values() for flag in flags_of(group)}


def _plain(group: FlagGroup) -> dict:
    values = {flag.name: getattr(group, flag.name) for flag in flags_of(type(group))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
