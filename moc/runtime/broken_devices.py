"""Counts consecutive workers ended by a device; at a limit, its node gives up its rank block."""

from __future__ import annotations

from dataclasses import dataclass, field

from moc.runtime.orders import Worker

MAX_BROKEN = 3
"""Consecutive workers that a device may end before its node gives up its rank block."""


@dataclass
class BrokenDevices:
    """Devices that have recently ended workers.

    Attributes:
        per_node: devices per node, with one worker each.
        ended: by device, the number of consecutive workers that it has ended.
    """

    per_node: int
    ended: dict[str, int] = field(default_factory=dict)

    def wears_out(self, worker: Worker) -> bool:
        """Counts a worker that its device has ended; returns whether the device has reached the limit."""
        device = self._device_of(worker)
        self.ended[device] = self.ended.get(device, 0) + 1
        return self.ended[device] >= MAX_BROKEN

    def is_well(self, worker: Worker) -> None:
        """Resets the count of a worker's device, because it works or the node gives up its rank block."""
        self.ended.pop(self._device_of(worker), None)

    def number_of(self, worker: Worker) -> int:
        """Returns the number of a worker's device on its node."""
        return worker.rank % self.per_node

    def _device_of(self, worker: Worker) -> str:
        return f"{worker.node}.{self.number_of(worker)}"
