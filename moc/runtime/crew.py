"""The live workers of a job, by the names of their processes."""

from __future__ import annotations

from dataclasses import dataclass, field

from moc.runtime.orders import Worker


@dataclass
class Crew:
    """Who trains, and who builds for nodes that are about to be taken in.

    Attributes:
        workers: that have a rank among the members, by name.
        guests: that build beside them, by name.
        started: number of all that were ever started.
    """

    workers: dict[str, Worker] = field(default_factory=dict)
    guests: dict[str, Worker] = field(default_factory=dict)
    started: int = 0

    def new_name(self, generation: int) -> str:
        """The name of a worker that is about to be started; no other worker of the job has it."""
        self.started += 1
        return f"{generation}.{self.started}"

    @property
    def stays(self) -> bool:
        """Whether the program goes on in the same processes when the members change."""
        return any(worker.stays for worker in self.workers.values())

    def forget(self, node: int) -> None:
        """Drops all workers of a node."""
        self.workers = {name: worker for name, worker in self.workers.items() if worker.node != node}
        self.guests = {name: guest for name, guest in self.guests.items() if guest.node != node}
