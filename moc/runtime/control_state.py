"""What a controller knows and cannot ask for again; every agent keeps a copy of it for the next one."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass
class ControlState:
    """One controller's copy.

    Attributes:
        epoch: of the controller that has told it.
        version: of what it has told.
        job: name of this launch of the job, of which there is no other.
        membership: as :meth:`moc.runtime.membership.Membership.state_dict` has it.
        doors: by node (JSON has it as text), a port that its agent's process keeps open as long as it lives.
    """

    epoch: int
    version: int
    job: str
    membership: dict = field(default_factory=dict)
    doors: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def begun(cls, epoch: int) -> ControlState:
        """Of a job that begins."""
        return cls(epoch, 0, secrets.token_hex(8))

    @classmethod
    def from_told(cls, told: dict | None) -> ControlState | None:
        """What an agent has kept; TypeError if it is none."""
        return None if told is None else cls(**told)

    def taken_over(self, epoch: int) -> ControlState:
        """The same, of the controller that goes on."""
        return replace(self, epoch=epoch)

    @property
    def told(self) -> dict:
        """What agents are to keep; JSON can hold it."""
        return dict(vars(self))

    @property
    def seated(self) -> set[int]:
        """Nodes that had places, and were not known to be lost."""
        places = self.membership
        return {node for place, node in places["places"] if place not in places["vacant"]}

    def has_come(self, node: int, door: str | None) -> None:
        """An agent is there."""
        self.doors = self.doors | {str(node): door}

    def changes(self, membership: dict) -> bool:
        """Takes up what is known now; whether that is anything new."""
        if membership == self.membership:
            return False
        self.membership, self.version = membership, self.version + 1
        return True


def newest(states: Iterable[ControlState | None]) -> ControlState | None:
    """The newest of what agents have kept; None if they have nothing."""
    there = (state for state in states if state is not None and state.membership)
    return max(there, key=lambda state: (state.epoch, state.version), default=None)
