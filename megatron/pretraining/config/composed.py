"""The configuration: all groups of flags together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import yaml

from megatron.pretraining.config.convert import convert
from megatron.pretraining.config.derive import derive
from megatron.pretraining.config.ds_config import agree, settings_in
from megatron.pretraining.config.flag import Flag, FlagGroup, flags_of
from megatron.pretraining.config.groups import FlagGroups, group_classes
from megatron.pretraining.config.together import check_together


@dataclasses.dataclass(frozen=True)
class Config(FlagGroups):
    """Every flag in force, by group; built by ``parse_config`` or ``compose``."""

    def replace(self, group: str, **changes: object) -> Config:
        """A copy with other values in one group, derived and checked again.

        For example ``config.replace("training", train_iters=3)``.

        Raises:
            AttributeError: the group has no such field.
            ConfigError: the result cannot work.
        """
        for name in changes:
            getattr(getattr(self, group), name)
        return compose({**self.given, **changes}, self.model)

    def to_dict(self) -> dict:
        """Plain values by group, for YAML or JSON."""
        groups = {name: _plain(getattr(self, name)) for name in group_classes()}
        return {"model": self.model, **groups}

    def to_yaml(self) -> str:
        """The output of ``--print-config``, which ``--config`` reads."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def compose(given: Mapping[str, object], model: str | None = None) -> Config:
    """Defaults, overridden by the values given by field name and in a ds_config, then derived and checked.

    Raises:
        ConfigError: a value or a combination cannot work.
    """
    flags = all_flags()
    if path := given.get("deepspeed_config"):
        given = {**agree(given, settings_in(str(path)), _mean_the_same), **given}
    values = {name: flag.default for name, flag in flags.items()}
    values.update((name, convert(flags[name], value)) for name, value in given.items())
    values = derive(values)
    groups: dict[str, Any] = {
        name: group(**{flag.name: values[flag.name] for flag in flags_of(group)})
        for name, group in group_classes().items()
    }
    config = Config(**groups, model=model, given=dict(given))
    check_together(config)
    return config


@functools.cache
def all_flags() -> dict[str, Flag]:
    """All flags by field name, which is unique across groups."""
    return {flag.name: flag for group in group_classes().values() for flag in flags_of(group)}


def _mean_the_same(name: str, one: object, other: object) -> bool:
    flag = all_flags()[name]
    return convert(flag, one) == convert(flag, other)


def _plain(group: FlagGroup) -> dict:
    values = {flag.name: getattr(group, flag.name) for flag in flags_of(type(group))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
