"""Counts generations that lose a worker at one iteration or during startup, so that a job without progress ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_STANDSTILL = 3
"""Default of ``--max-standstill``."""


@dataclass(frozen=True)
class Standstill:
    """Losses since the newest iteration that is known to be completed.

    Attributes:
        iteration: this iteration; -1 if no worker has reported one, as before the first workers have resumed.
        devices: node and device of the lost workers, one for each generation.
    """

    iteration: int = -1
    devices: Sequence[tuple[int, int]] = ()

    def after_loss(self, node: int, device: int, iteration: int | None) -> Standstill:
        """Returns the state after a loss; ``iteration`` is the newest one that the lost worker has reported, if any."""
        newest = self.iteration if iteration is None else max(self.iteration, iteration)
        before = self.devices if newest == self.iteration else ()
        return Standstill(newest, (*before, (node, device)))

    def after_report(self, iteration: int | None) -> Standstill:
        """Returns the state after a survivor of the newest loss has reported its iteration."""
        if iteration is None or iteration <= self.iteration:
            return self
        return Standstill(iteration, self.devices[-1:])

    def to_message(self) -> dict[str, Any]:
        """Returns its fields in messages and in events."""
        fields = {"lost_after": self.iteration} if self.iteration >= 0 else {}
        return fields | {"lost_devices": list(self.devices)}

    @property
    def phase(self) -> str:
        """Describes when the workers were lost."""
        return f"after iteration {self.iteration}" if self.iteration >= 0 else "before training"

    @property
    def shared_device(self) -> str:
        """Describes the node or device of all losses; empty if they differ."""
        nodes, devices = {node for node, _ in self.devices}, set(self.devices)
        if len(nodes) != 1:
            return ""
        device = f"device {self.devices[0][1]} of " if len(devices) == 1 else ""
        return f", each time on {device}node {self.devices[0][0]}"
