"""Defines the configuration: all groups of flags together."""

from __future__ import annotations

import abc
import dataclasses
import functools

from megatron.pretraining.config.flag import Flag, flags_of
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
