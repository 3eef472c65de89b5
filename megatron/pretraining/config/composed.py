"""The configuration: all groups of flags together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from megatron.pretraining.config.convert import convert
from megatron.pretraining.config.derive import derive
from megatron.pretraining.config.ds_config import SETTABLE, agree, settings_in
from megatron.pretraining.config.flag import UNKNOWN, ConfigError, Flag, FlagGroup, Problems, flags_of
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


def compose(
    given: Mapping[str, object],
    model: str | None = None,
    problems: Problems | None = None,
    check_workers: Callable[[Config], None] | None = None,
) -> Config:
    """Defaults, overridden by the values given by field name and in a ds_config, then derived and checked.

    Args:
        given: values by field name; ``UNKNOWN`` for a value that a problem of ``problems`` conceals.
        model: name of the preset.
        problems: found before.
        check_workers: a further check.

    Raises:
        ConfigError: values or combinations cannot work; it has all problems that can be found together.
    """
    problems, named = problems or Problems(), dict(given)
    given = {name: value for name, value in named.items() if value is not UNKNOWN}
    if path := named.get("deepspeed_config"):
        try:
            added = dict.fromkeys(SETTABLE, UNKNOWN) if path is UNKNOWN else _settings(str(path), given)
        except ConfigError as error:
            problems.found += error.problems
            added = dict.fromkeys(SETTABLE, UNKNOWN)
        given, named = {**added, **given}, {**added, **named}
    values = derive({name: _value(flag, named, problems) for name, flag in all_flags().items()}, problems)
    groups: dict[str, Any] = {name: group.unchecked(values) for name, group in group_classes().items()}
    for group in groups.values():
        group.find_problems(problems)
    config = Config(**groups, model=model, given=given)
    problems.check(check_together, config)
    if check_workers is not None:
        problems.check(check_workers, config)
    problems.raise_found()
    return config


def _settings(path: str, given: Mapping[str, object]) -> dict[str, object]:
    return agree(given, settings_in(path), _mean_the_same)


def _value(flag: Flag, given: Mapping[str, object], problems: Problems) -> object:
    """A flag's value as given, or its default; ``UNKNOWN`` if it cannot be used."""
    value = given.get(flag.name, flag.default)
    if value is UNKNOWN:
        return UNKNOWN
    try:
        value = convert(flag, value) if flag.name in given else value
        flag.check(value)
    except ConfigError as error:
        problems.found.append(error)
        return UNKNOWN
    return value


@functools.cache
def all_flags() -> dict[str, Flag]:
    """All flags by field name, which is unique across groups."""
    return {flag.name: flag for group in group_classes().values() for flag in flags_of(group)}


def _mean_the_same(name: str, one: object, other: object) -> bool:
    flag = all_flags()[name]
    try:
        return convert(flag, one) == convert(flag, other)
    except ConfigError:
        return True  # the conversion of the value in force reports it


def _plain(group: FlagGroup) -> dict:
    values = {flag.name: getattr(group, flag.name) for flag in flags_of(type(group))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
