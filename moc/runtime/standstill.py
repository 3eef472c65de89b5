"""Counts generations that lose a worker at one iteration, so that a job without progress ends."""

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
        iteration: this iteration; -1 if none is known, as in programs that report no progress.
        devices: node and device of the lost workers, one for each generation; only the newest if no iteration is known.
    """

    iteration: int = -1
    devices: Sequence[tuple[int, int]] = ()

    def after_loss(self, node: int, device: int, iteration: int | None) -> Standstill:
        """Returns the state after a loss; ``iteration`` is the newest one that the lost worker has reported, if any."""
        known = self.iteration if iteration is None else max(self.iteration, iteration)
        before = self.devices if known == self.iteration else ()
        return Standstill(known, (*(before if known >= 0 else ()), (node, device)))

    def after_report(self, iteration: int | None) -> Standstill:
        """Returns the state after a survivor of the newest loss has reported its iteration."""
        if iteration is None or iteration <= self.iteration:
            return self
        return Standstill(iteration, self.devices[-1:])

    def to_message(self) -> dict[str, Any]:
        """Returns its fields in messages and in events; none if no iteration is known."""
        return {"lost_after": self.iteration, "lost_devices": list(self.devices)} if self.iteration >= 0 else {}

    @property
    def where(self) -> str:
        """Describes the node or device of all losses; empty if they differ."""
        nodes, devices = {node for node, _ in self.devices}, set(self.devices)
        if len(nodes) != 1:
            return ""
        device = f"device {self.devices[0][1]} of " if len(devices) == 1 else ""
        return f", each time on {device}node {self.devices[0][0]}"
