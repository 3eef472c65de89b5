"""Defines the worker records of a job's membership, and its orders to nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum


class Cause(StrEnum):
    """Cause of a new generation."""

    WORKER_LOST = "worker-lost"
    WORKER_HANGS = "worker-hangs"
    WORKER_STARTS_OVER = "worker-starts-over"
    CONNECTIONS_LOST = "connections-lost"
    NODE_LOST = "node-lost"
    NODE_GAVE_UP = "node-gave-up"
    NODE_JOINED = "node-joined"
    NODES_CAME = "nodes-came"
    NODES_WAITED = "nodes-waited"
    NODE_MOVES = "node-moves"
    GUESTS_LOST = "guests-lost"
    NODES_REFUSED = "nodes-refused"
    PARTS_CHANGED = "parts-changed"
    STORE_LOST = "store-lost"
    JOB_STOPS = "job-stops"


@dataclass(frozen=True)
class Why:
    """Cause of a new generation, as a code (also of an error) and as a sentence."""

    cause: str
    sentence: str


@dataclass(frozen=True)
class StartWorker:
    """Order to a node to start a worker for a generation."""

    node: int
    worker: str  # unique name
    rank: int
    generation: int
    together: bool  # all workers start now; otherwise it initializes separately
    place: int  # rank block of the node
    size: int  # number of workers
    guest: bool = False  # it initializes while others train, and gets a rank when it is ready
    helpers: tuple[int, ...] = ()  # model part of each partial-model node; these are the last nodes


@dataclass(frozen=True)
class Seat:
    """Order to a node to continue a worker under another rank, starting with a generation."""

    node: int
    worker: str
    rank: int
    generation: int
    size: int  # number of workers
    helpers: tuple[int, ...] = ()  # as in StartWorker


@dataclass(frozen=True)
class Leave:
    """Order to all nodes to ask the workers to save and exit, since more are about to start."""


@dataclass(frozen=True)
class Welcome:
    """Order to all workers to leave this generation after an iteration, since joining workers are ready."""

    generation: int


@dataclass(frozen=True)
class Kill:
    """Order to a node to kill a worker that is no longer needed."""

    node: int
    worker: str


@dataclass(frozen=True)
class GiveUp:
    """Order to a node to leave the job, since one of its devices is broken."""

    node: int
    why: str  # one sentence, and the code of the error


@dataclass(frozen=True)
class Abort:
    """Order to all workers to abort all waits, and report in this generation."""

    generation: int
    cause: str
    reason: str = field(default="", compare=False)  # one sentence


@dataclass(frozen=True)
class Go:
    """Order to all workers to connect, since all have reported."""

    generation: int


@dataclass(frozen=True)
class End:
    """Order to all nodes to end, since the job is over."""

    code: int  # exit code of the job
    reason: str  # one sentence, with the code of an error of the job itself; empty on success
    leaving: bool  # workers are about to exit on their own, and get time to do so
    gives_back: str | None = None  # the run's memory on each node, if workers have released it
    asked: int | None = None  # number of the signal that requested this end; launchers report it

    def to_message(self) -> dict:
        """Returns its description in messages and in the controller's state."""
        return {
            "code": self.code,
            "reason": self.reason,
            "leaving": self.leaving,
            "gives_back": self.gives_back,
            "asked": self.asked,
        }

    @classmethod
    def from_message(cls, values: dict) -> End:
        """Returns the order of a description."""
        return cls(*(values[key] for key in ("code", "reason", "leaving", "gives_back", "asked")))


Order = StartWorker | Seat | Leave | Welcome | Kill | GiveUp | Abort | Go | End


@dataclass
class Worker:
    """A live worker."""

    name: str  # name of the process
    node: int
    rank: int
    together: bool  # started with all others
    built: bool = False  # ready to train, and so able to survive the loss of others
    here: int = -1  # generation in which it last reported
    met: int = -1  # generation in which it last connected with the others
    parted: int = -1  # generation that it last left after an iteration, for joining workers
    born: int = 0  # generation in which it got its rank
    stays: bool = False  # the program continues in the same processes when their number changes
    guest: bool = False  # initializes on a new node, and belongs to no generation yet
    size: int = 0  # number of workers in the generations of its rank
    helpers: Sequence[int] = ()  # as StartWorker.helpers, in these generations

    def told(self) -> dict:
        """Returns the description that an agent sends to its controller."""
        return {_WIRE_NAMES.get(each.name, each.name): getattr(self, each.name) for each in fields(Worker)}

    @classmethod
    def from_message(cls, values: dict) -> Worker:
        """Returns the worker of a description; raises TypeError if it is malformed."""
        names = {key: name for name, key in _WIRE_NAMES.items()}
        return cls(**{names.get(key, key): value for key, value in values.items()})


_WIRE_NAMES = {
    "starts_together": "together",
    "is_ready": "built",
    "reported_generation": "here",
    "connected_generation": "met",
    "drained_generation": "parted",
    "rank_generation": "born",
    "survives_resize": "stays",
    "is_joining": "guest",
    "partial_model_parts": "helpers",
}
"""Keys of a worker's fields in messages, if they differ from the names."""
