"""Tracks the live workers of a job by process name."""

from __future__ import annotations

from dataclasses import dataclass, field

from moc.runtime.orders import Worker


@dataclass
class Crew:
    """Training workers, and joining workers of new nodes.

    Attributes:
        workers: workers with a rank among the members, by name.
        guests: joining workers, which initialize in the background, by name.
        started: number of workers ever started.
    """

    workers: dict[str, Worker] = field(default_factory=dict)
    guests: dict[str, Worker] = field(default_factory=dict)
    started: int = 0

    def new_name(self, generation: int) -> str:
        """Returns a name, unique in the job, for a worker to be started."""
        self.started += 1
        return f"{generation}.{self.started}"

    @property
    def stays(self) -> bool:
        """Whether the program continues in the same processes when the members change."""
        return any(worker.stays for worker in self.workers.values())

    def forget(self, node: int) -> None:
        """Drops all workers of a node."""
        self.workers = {name: worker for name, worker in self.workers.items() if worker.node != node}
        self.guests = {name: guest for name, guest in self.guests.items() if guest.node != node}
