"""Defines the configuration: all groups of flags together."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from megatron.pretraining.config.flag import Flag, FlagGroup, Problems, convert_value, flags_of
from megatron.pretraining.config.groups import FlagGroups, group_classes


@dataclasses.dataclass(frozen=True)
class Config(FlagGroups):
    """Every flag in force, by group."""

    @abc.abstractmethod
    def replace(self, group: str, **changes: object) -> Config:
        """Returns a copy with other values in one group.

        Raises:
            AttributeError: the group has no such field.
            ConfigError: the result is invalid.
        """


@functools.cache
def all_flags() -> dict[str, Flag]:
    """Returns all flags of this project by field name, which is unique across groups."""
    return {flag.name: flag for group in group_classes().values() for flag in flags_of(group)}


def converted(own: Mapping[str, object]) -> dict[str, Any]:
    """Returns values of our flags, by name, in the types of their fields; raises ConfigError with all problems."""
    problems, given = Problems(), dict[str, Any]()
    for name, value in own.items():
        problems.check(lambda name=name, value=value: given.update({name: convert_value(all_flags()[name], value)}))
    problems.raise_found()
    if given.get("deepspeed"):
        given.setdefault("zero_stage", 1)
    return given


def group_of(kind: type[FlagGroup], given: Mapping[str, object]) -> FlagGroup:
    """Returns a group that consists of our flags only; raises ConfigError if its values contradict each other."""
    return kind(**{flag.name: given.get(flag.name, flag.default) for flag in flags_of(kind)})
