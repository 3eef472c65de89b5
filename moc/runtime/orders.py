"""Defines the worker records of a job's membership, and its orders to nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any


class Cause(StrEnum):
    """Cause of a new generation."""

    WORKER_LOST = "worker-lost"
    WORKER_HANGS = "worker-hangs"
    WORKER_STARTS_OVER = "worker-starts-over"
    CONNECTIONS_LOST = "connections-lost"
    NODE_LOST = "node-lost"
    NODE_GAVE_UP = "node-gave-up"
    NODE_DEPARTED = "node-departed"
    NODE_JOINED = "node-joined"
    NODES_ARRIVED = "nodes-came"
    NODES_WAITED = "nodes-waited"
    NODE_MOVES = "node-moves"
    JOINING_NODES_LOST = "guests-lost"
    NODES_REFUSED = "nodes-refused"
    PARTS_CHANGED = "parts-changed"
    STORE_LOST = "store-lost"
    JOB_STOPS = "job-stops"


@dataclass(frozen=True)
class GenerationReason:
    """Cause of a new generation, as a code (also of an error) and as a sentence.

    Attributes:
        lost: fields of the event about a lost worker or node, such as ``rank``, ``node`` and ``signal``; ``earlier``
            has the losses that no event describes yet (:class:`~moc.runtime.loss_record.LossRecord`).
    """

    cause: str
    reason: str
    lost: Mapping[str, Any] = field(default_factory=dict)  # fields of the event about a loss


@dataclass(frozen=True)
class StartWorker:
    """Order to a node to start a worker for a generation."""

    node: int
    worker: str  # unique name
    rank: int
    generation: int
    starts_together: bool  # all workers start now; otherwise it initializes separately
    rank_block: int  # rank block of the node
    size: int  # number of workers
    is_joining: bool = False  # it initializes while others train, and gets a rank when it is ready
    partial_model_parts: tuple[int, ...] = ()  # model part of each partial-model node; these are the last nodes


@dataclass(frozen=True)
class AssignRank:
    """Order to a node to continue a worker under another rank, starting with a generation."""

    node: int
    worker: str
    rank: int
    generation: int
    size: int  # number of workers
    partial_model_parts: tuple[int, ...] = ()  # as in StartWorker


@dataclass(frozen=True)
class SaveAndExit:
    """Order to all nodes to ask the workers to save and exit, since more are about to start."""


@dataclass(frozen=True)
class ChangeNotice:
    """Order to all workers to leave this generation after an iteration: workers have joined, or nodes depart."""

    generation: int
    departing: tuple[int, ...] = ()  # rank blocks whose workers first move their state to the others


@dataclass(frozen=True)
class ReleaseNode:
    """Order to a departing node to end: the others have its state."""

    node: int


@dataclass(frozen=True)
class StopNode:
    """Order to a departing node to stop the job instead, since the others cannot continue without it."""

    node: int


@dataclass(frozen=True)
class Kill:
    """Order to a node to kill a worker that is no longer needed."""

    node: int
    worker: str


@dataclass(frozen=True)
class RemoveNode:
    """Order to a node to leave the job, since one of its devices is broken."""

    node: int
    reason: str  # one sentence, and the code of the error


@dataclass(frozen=True)
class Abort:
    """Order to all workers to abort all waits, and report in this generation."""

    generation: int
    cause: str
    reason: str = field(default="", compare=False)  # one sentence
    lost: Mapping[str, Any] = field(default_factory=dict, compare=False)  # as in GenerationReason


@dataclass(frozen=True)
class Connect:
    """Order to all workers to connect, since all have reported."""

    generation: int


@dataclass(frozen=True)
class End:
    """Order to all nodes to end, since the job is over."""

    code: int  # exit code of the job
    reason: str  # one sentence, with the code of an error of the job itself; empty on success
    workers_exiting: bool  # workers are about to exit on their own, and get time to do so
    released_memory: str | None = None  # the run's memory on each node, if workers have released it
    stop_signal: int | None = None  # number of the signal that requested this end; launchers report it
    losses: Sequence[Mapping[str, Any]] = field(default=(), compare=False)  # not written as events, the last included

    def to_message(self) -> dict:
        """Returns its description in messages and in the controller's state."""
        return {
            "code": self.code,
            "reason": self.reason,
            "leaving": self.workers_exiting,
            "gives_back": self.released_memory,
            "asked": self.stop_signal,
            "losses": list(self.losses),
        }

    @classmethod
    def from_message(cls, values: dict) -> End:
        """Returns the order of a description."""
        return cls(*(values[key] for key in ("code", "reason", "leaving", "gives_back", "asked", "losses")))


Order = (
    StartWorker
    | AssignRank
    | SaveAndExit
    | ChangeNotice
    | ReleaseNode
    | StopNode
    | Kill
    | RemoveNode
    | Abort
    | Connect
    | End
)


@dataclass
class WorkerRecord:
    """A live worker."""

    name: str  # name of the process
    node: int
    rank: int
    starts_together: bool  # started with all others
    is_ready: bool = False  # ready to train, and so able to survive the loss of others
    reported_generation: int = -1  # generation of its last report
    connected_generation: int = -1  # generation of its last connection with the others
    drained_generation: int = -1  # generation that it last left after an iteration, for a change of members
    has_handed_over: bool = False  # the others had its state when it left that generation
    rank_generation: int = 0  # generation that assigned its rank
    survives_resize: bool = False  # the program continues in the same processes when their number changes
    is_joining: bool = False  # initializes on a new node, and belongs to no generation yet
    size: int = 0  # number of workers in the generations of its rank
    partial_model_parts: Sequence[int] = ()  # as StartWorker.helpers, in these generations

    def to_message(self) -> dict:
        """Returns the description that an agent sends to its controller."""
        return {
            _WIRE_NAMES.get(record_field.name, record_field.name): getattr(self, record_field.name)
            for record_field in fields(WorkerRecord)
        }

    @classmethod
    def from_message(cls, values: dict[str, Any]) -> WorkerRecord:
        """Returns the worker of a description; raises TypeError if it is malformed."""
        names = {key: name for name, key in _WIRE_NAMES.items()}
        return cls(**{names.get(key, key): value for key, value in values.items()})


_WIRE_NAMES = {
    "starts_together": "together",
    "is_ready": "built",
    "reported_generation": "here",
    "connected_generation": "met",
    "drained_generation": "parted",
    "has_handed_over": "handed_over",
    "rank_generation": "born",
    "survives_resize": "stays",
    "is_joining": "guest",
    "partial_model_parts": "helpers",
}
"""Keys of a worker's fields in messages, if they differ from the names."""
