"""Defines the controller state that agents' reports cannot restore; each agent has a copy for the next leader."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class ControlState:
    """State of one controller; JSON-serializable by ``vars()``.

    Attributes:
        epoch: epoch of the controller that sent the state.
        version: increases with every change within an epoch.
        job: unique ID of this launch.
        membership: from :meth:`moc.runtime.membership.Membership.state_dict`.
        doors: by node (a string, for JSON), the listening address of its agent's process.
    """

    epoch: int
    version: int
    job: str
    membership: dict = field(default_factory=dict)
    doors: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def begun(cls, epoch: int) -> ControlState:
        """Returns the state of a new job."""
        return cls(epoch, 0, secrets.token_hex(8))

    @property
    def seated(self) -> set[int]:
        """Nodes that filled rank blocks and were not known to be lost."""
        places = self.membership
        return {node for place, node in places["places"] if place not in places["vacant"]}

    def changes(self, membership: dict) -> bool:
        """Updates the membership; returns whether it changed."""
        if membership == self.membership:
            return False
        self.membership, self.version = membership, self.version + 1
        return True


def newest(states: Iterable[ControlState | None]) -> ControlState | None:
    """Returns the newest of the agents' copies; None if no agent has one."""
    there = (state for state in states if state is not None and state.membership)
    return max(there, key=lambda state: (state.epoch, state.version), default=None)
