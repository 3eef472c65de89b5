"""Who is in the job: a state machine, without sockets, clocks and processes.  What happens goes in, orders come out.

A *generation* is a membership with a number.  It begins when a worker is lost: whoever is left is told to abort what it
is doing, new workers are started in the places of the lost ones, and when all of them say that they are *here*, all may
*go* on.  What is lost meanwhile begins the next generation; nothing waits for a worker of an earlier one.

    begin --> gathering --all here--> running --a worker is lost--> gathering (next generation) --> ...
                                         `----all exited with 0, or one with another code--> ended
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

SAVED = 75
"""Exit code of a worker that was asked to stop, and has saved its state."""

MAX_SUSPICIONS = 10
"""Generations that begin although nobody was lost, before the job gives up."""

START_OVER = 76
"""Exit code of a worker that wants to be replaced: nobody has done anything wrong."""


@dataclass(frozen=True)
class Start:
    """To a node: start a worker.

    Attributes:
        node: which.
        worker: its name, of which there is no other.
        rank: its place.
        generation: for which.
        together: all workers begin now; else it takes the place of a lost one, and builds alone.
    """

    node: int
    worker: str
    rank: int
    generation: int
    together: bool


@dataclass(frozen=True)
class Kill:
    """To a node: a worker is of no use any more."""

    node: int
    worker: str


@dataclass(frozen=True)
class Abort:
    """To all workers: leave whatever you wait in, and say that you are here in this generation."""

    generation: int
    reason: str


@dataclass(frozen=True)
class Go:
    """To all workers: all are here."""

    generation: int


@dataclass(frozen=True)
class End:
    """To all nodes: the job is over.

    Attributes:
        code: exit code of the job.
        reason: one sentence; empty where all went well.
    """

    code: int
    reason: str


Order = Start | Kill | Abort | Go | End


@dataclass
class Worker:
    """A live worker.

    Attributes:
        name: of the process.
        node: where it is.
        rank: its place.
        together: it was started with all others.
        built: it has what it needs to train, so it can outlive the loss of others.
        here: the generation in which it waits for the others, or that it is in.
    """

    name: str
    node: int
    rank: int
    together: bool
    built: bool = False
    here: int = -1


@dataclass
class Membership:
    """The state machine; every method takes in what has happened and returns what is to be done.

    Attributes:
        size: workers.
        per_node: workers of each node.
        max_restarts: workers lost by signals that are replaced, before the job gives up.
    """

    size: int
    per_node: int
    max_restarts: int
    generation: int = 0
    running: bool = False
    workers: dict[str, Worker] = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)
    restarts: int = 0
    suspicions: int = 0
    end: End | None = None
    _stopping: bool = False
    _finished: set[int] = field(default_factory=set)
    _started: int = 0

    def joined(self, node: int, workers: Iterable[Worker] = (), generation: int = 0) -> list[Order]:
        """A node is there, with the workers that it has already, if a controller before this one has started some."""
        self.nodes.add(node)
        self.workers |= {worker.name: worker for worker in workers}
        self.generation = max(self.generation, generation)
        if len(self.nodes) * self.per_node < self.size or self.end:
            return []
        if self.workers and len(self.workers) < self.size:
            return self._next_generation(f"node {node} is there")
        self.running = self._all_here()
        return self._fill()

    def left(self, node: int) -> list[Order]:
        """A node is lost, with all its workers; it may come back."""
        self.nodes.discard(node)
        lost = [worker for worker in self.workers.values() if worker.node == node]
        for worker in lost:
            del self.workers[worker.name]
        return self._next_generation(f"node {node} is lost") if lost and not self.end else []

    def ended(self, name: str, code: int) -> list[Order]:
        """A worker has ended.

        Args:
            name: of the worker; one that was told to be killed is of no interest any more.
            code: its exit code; minus the number of the signal that killed it.
        """
        worker = self.workers.pop(name, None)
        if worker is None or self.end:
            return []
        if code == 0:
            self._finished.add(worker.rank)
            return self._over(0, "") if len(self._finished) == self.size else []
        if code == START_OVER and not self._stopping:
            return self._next_generation(f"worker {worker.rank} starts over")
        how = f"worker {worker.rank} {_how(code)}"
        self.restarts += code < 0
        if code > 0 or self._stopping:
            return self._over(code if code > 0 else 128 - code, how)
        if self.restarts > self.max_restarts:
            return self._over(128 - code, f"{how}, and {self.max_restarts} were replaced already (--max-restarts)")
        return self._next_generation(how)

    def built(self, name: str) -> list[Order]:
        """A worker has what it needs to train."""
        if name in self.workers:
            self.workers[name].built = True
        return []

    def here(self, name: str, generation: int) -> list[Order]:
        """A worker waits for the others in a generation."""
        if name not in self.workers or self.end:
            return []
        self.workers[name].here = generation
        if self.running or not self._all_here():
            return []
        self.running = True
        return [Go(self.generation)]

    def suspected(self, name: str, generation: int) -> list[Order]:
        """A worker cannot go on, and no loss has become known for a while: connections are lost, not workers."""
        if name not in self.workers or generation != self.generation or self.end:
            return []
        what = f"worker {self.workers[name].rank} has lost connections"
        self.suspicions += 1
        if self.suspicions > MAX_SUSPICIONS:
            return self._over(1, f"{what}, for the {self.suspicions}th time that nobody was lost: look at the network")
        return self._next_generation(what)

    def stopping(self) -> list[Order]:
        """The job was asked to stop: whoever ends now is not replaced."""
        self._stopping = True
        return []

    def _all_here(self) -> bool:
        return len(self.workers) == self.size and all(w.here == self.generation for w in self.workers.values())

    def _next_generation(self, reason: str) -> list[Order]:
        self.generation, self.running = self.generation + 1, False
        self._finished.clear()
        return [Abort(self.generation, reason), *self._fill()]

    def _fill(self) -> list[Order]:
        """Starts what is missing.  Who has not built what it needs, in step with all others, cannot do so any more."""
        orders: list[Order] = []
        anybody = any(worker.built for worker in self.workers.values())
        for worker in list(self.workers.values()):
            if not worker.built and (worker.together or not anybody) and worker.here != self.generation:
                orders.append(Kill(worker.node, worker.name))
                del self.workers[worker.name]
        taken = {worker.rank for worker in self.workers.values()}
        for rank in sorted(set(range(self.size)) - taken):
            if rank // self.per_node in self.nodes:
                orders.append(self._start(rank, together=not anybody))
        return orders

    def _start(self, rank: int, together: bool) -> Start:
        self._started += 1
        worker = Worker(f"{self.generation}.{self._started}", rank // self.per_node, rank, together)
        self.workers[worker.name] = worker
        return Start(worker.node, worker.name, rank, self.generation, together)

    def _over(self, code: int, reason: str) -> list[Order]:
        self.end = End(code, reason)
        return [self.end]


def _how(code: int) -> str:
    if code < 0:
        return f"was killed by signal {-code}"
    return "was asked to stop, and has saved" if code == SAVED else f"failed (exit code {code})"
