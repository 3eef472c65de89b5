"""Counts the workers that a device has ended: a node with one that ends each of them gives up its place."""

from __future__ import annotations

from dataclasses import dataclass, field

from moc.runtime.orders import Worker

MAX_BROKEN = 3
"""Workers in a row that one device may end before its node gives up its place."""


@dataclass
class BrokenDevices:
    """Devices that have lately ended workers.

    Attributes:
        per_node: devices of a node; each has one worker.
        ended: by device, the workers in a row that it has ended.
    """

    per_node: int
    ended: dict[str, int] = field(default_factory=dict)

    def wears_out(self, worker: Worker) -> bool:
        """Counts a worker that its device has ended; returns whether another one there would fare no better."""
        device = self._device_of(worker)
        self.ended[device] = self.ended.get(device, 0) + 1
        return self.ended[device] >= MAX_BROKEN

    def is_well(self, worker: Worker) -> None:
        """Forgets what a worker's device has done: it works, or somebody has looked at it."""
        self.ended.pop(self._device_of(worker), None)

    def number_of(self, worker: Worker) -> int:
        """The number of a worker's device on its node."""
        return worker.rank % self.per_node

    def _device_of(self, worker: Worker) -> str:
        return f"{worker.node}.{self.number_of(worker)}"
