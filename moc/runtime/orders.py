"""Workers as a job's membership knows them, and its orders to their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum


class Cause(StrEnum):
    """Why a generation begins."""

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
    """Why a generation begins, for programs (also the code of an error) and as a sentence."""

    cause: str
    sentence: str


@dataclass(frozen=True)
class StartWorker:
    """To a node: start a worker for a generation."""

    node: int
    worker: str  # unique name
    rank: int
    generation: int
    together: bool  # all workers start now; otherwise it replaces a lost one, and builds alone
    place: int  # of the node
    size: int  # number of workers
    guest: bool = False  # it builds beside those that train, and is seated when it is ready
    helpers: tuple[int, ...] = ()  # of the last nodes, which help: the part of the model that each has


@dataclass(frozen=True)
class Seat:
    """To a node: a worker goes on, with another rank from a generation on."""

    node: int
    worker: str
    rank: int
    generation: int
    size: int  # number of workers
    helpers: tuple[int, ...] = ()  # as of StartWorker


@dataclass(frozen=True)
class Leave:
    """To all nodes: ask the workers to save and to leave, since more are about to start."""


@dataclass(frozen=True)
class Welcome:
    """To all workers: guests are ready; leave this generation at the end of an iteration, to meet them in the next."""

    generation: int


@dataclass(frozen=True)
class Kill:
    """To a node: kill a worker that is no longer needed."""

    node: int
    worker: str


@dataclass(frozen=True)
class GiveUp:
    """To a node: leave the job, since one of its devices does not work."""

    node: int
    why: str  # one sentence, and the code of the error


@dataclass(frozen=True)
class Abort:
    """To all workers: abort all waits, and report in this generation."""

    generation: int
    cause: str
    reason: str = field(default="", compare=False)  # one sentence


@dataclass(frozen=True)
class Go:
    """To all workers: all are here; connect."""

    generation: int


@dataclass(frozen=True)
class End:
    """To all nodes: the job is over."""

    code: int  # exit code of the job
    reason: str  # one sentence, with the code of an error of the job itself; empty on success
    leaving: bool  # workers are about to exit by themselves, and get time to do so
    gives_back: str | None = None  # the run's memory on each node, if workers have released it
    asked: int | None = None  # number of the signal that asked for this end; launchers report it


Order = StartWorker | Seat | Leave | Welcome | Kill | GiveUp | Abort | Go | End


@dataclass
class Worker:
    """A live worker."""

    name: str  # of the process
    node: int
    rank: int
    together: bool  # it was started with all others
    built: bool = False  # it is ready to train, and so can survive the loss of others
    here: int = -1  # the generation in which it last reported
    met: int = -1  # the generation in which it last connected with the others
    parted: int = -1  # the generation that it last left at the end of an iteration, to meet guests
    born: int = 0  # the generation that it got its rank in
    stays: bool = False  # the program goes on in the same processes when their number changes
    guest: bool = False  # it builds for a node that is to be taken in, and has no part in generations yet
    size: int = 0  # workers of the generations that it has its rank in
    helpers: Sequence[int] = ()  # the same of StartWorker.helpers

    @property
    def told(self) -> dict:
        """The description that an agent sends to its controller."""
        return {each.name: getattr(self, each.name) for each in fields(Worker)}
