"""Defines the settings of a policy in simulation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from moc.policy.costs import PolicySettings
from moc.policy.pec_selection import PLT_LIMIT

_NAMED = ("k", "window")  # settings of policies that are fields of Options


@dataclass(frozen=True)
class Options:
    """Settings that a user can fix.

    Attributes:
        interval: iterations between checkpoints; None for the best, or the policy's own rule.
        mtbf_s: MTBF that determines intervals.
        k: experts of each layer in a partial checkpoint; None for one in eight.
        dynamic: raise K when faults have used up its share of ``plt_limit``.
        plt_limit: see ``moc.policy.pec_selection``.
        window: W; None for Algorithm 1's.
        replicas: copies in peers' memory.
        persist_interval: iterations between checkpoints in storage; None for the shortest possible.
        own: further settings of a policy.
    """

    interval: int | None = None
    mtbf_s: float = 3600.0
    k: int | None = None
    dynamic: bool = True
    plt_limit: float = PLT_LIMIT
    window: int | None = None
    replicas: int = 2
    persist_interval: int | None = None
    own: PolicySettings = field(default_factory=dict, hash=False)

    @property
    def settings(self) -> dict[str, Any]:
        """The policy's own settings."""
        fixed = {name: getattr(self, name) for name in _NAMED if getattr(self, name) is not None}
        return fixed | dict(self.own)

    def with_settings(self, settings: PolicySettings) -> Options:
        """Returns a copy with other policy settings."""
        named = {name: value for name, value in settings.items() if name in _NAMED}
        others = {name: value for name, value in settings.items() if name not in _NAMED}
        return dataclasses.replace(self, **named, own={**self.own, **others})
