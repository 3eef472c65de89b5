"""Defines the stages of the saving pipeline, and the snapshots in progress that pass through them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from moc.errors import with_code
from moc.policy import SnapshotPlan
from moc.recovery.inventory import COPIED
from moc.session.peers import CopyOutcome
from moc.snapshot.saver import Snapshot
from moc.store.errors import CheckpointError, InsufficientMemoryError

POSITIONS = 2
"""Snapshots of a stage that one all-reduce can report: one more than can begin per iteration.  Otherwise one late
snapshot delays all later ones."""


@dataclass(frozen=True)
class SnapshotInProgress:
    """Snapshot that is not yet committed in each of its tiers.

    Attributes:
        plan: plan of the snapshot.
        storage: the part that goes to storage; None if nothing does.
        state: the non-tensor state.
        snapshot: this worker's part.
        replicated: done when this node has its copies of other nodes' parts; None without peers.
        committed: done when the snapshot is committed in storage, or after a failure its files are removed; finished on
            workers other than rank 0.
    """

    plan: SnapshotPlan
    storage: SnapshotPlan | None
    state: dict
    snapshot: Snapshot
    replicated: Future[CopyOutcome] | None = None
    committed: Future[None] | None = None

    @property
    def iteration(self) -> int:
        """Iterations completed when it began."""
        return self.plan.iteration

    @property
    def state_in_memory(self) -> dict:
        """The state, with the names of the operators that other nodes receive copies of, if not all."""
        return self.state if self.plan.remote is None else {**self.state, COPIED: list(self.plan.remote)}

    @property
    def storage_plan(self) -> SnapshotPlan:
        """The part that goes to storage, for snapshots that do."""
        assert self.storage is not None  # only such snapshots reach the stages of storage
        return self.storage

    @property
    def out_of_memory(self) -> InsufficientMemoryError | None:
        """The error if this worker lacked memory for its part; the snapshot is then to be abandoned."""
        finalized = self.snapshot.finalized
        error = finalized.exception() if finalized.done() and not finalized.cancelled() else None
        return error if isinstance(error, InsufficientMemoryError) else None


class Stage(ABC):
    """Stage of the pipeline: snapshots in the order of their beginning, which is identical on all workers.

    A snapshot leaves the stage when an all-reduce has shown that its work is done on all workers.

    Attributes:
        queue: snapshots whose work is not known to be done on all workers.
    """

    entry: ClassVar[str]
    """Entry of the commit all-reduce with the number of workers whose work is done."""

    def __init__(self, workers: int):
        self._workers = workers
        self.queue: deque[SnapshotInProgress] = deque()

    @abstractmethod
    def work(self, snapshot: SnapshotInProgress) -> Future:
        """Returns the work of this stage on this worker."""

    @abstractmethod
    def entries(self, snapshot: SnapshotInProgress | None) -> dict[str, float]:
        """Returns this worker's entries for a snapshot whose work is done; without one, the same entries as 0."""

    @abstractmethod
    def complete(self, snapshot: SnapshotInProgress, totals: Mapping[str, float]) -> None:
        """Passes a snapshot to the next stage; all workers do so after the same all-reduce."""

    def tolerates(self, snapshot: SnapshotInProgress) -> bool:
        """Whether training continues after an error of this worker's work."""
        return False

    def progress(self) -> list[dict[str, float]]:
        """Returns this worker's entries of the commit all-reduce for the first :data:`POSITIONS` snapshots."""
        finished = list(takewhile(lambda snapshot: self.work(snapshot).done(), self.queue))
        return [self.entries(finished[position] if position < len(finished) else None) for position in range(POSITIONS)]

    def advance(self, totals: Mapping[str, float]) -> None:
        """Receives the totals for one position: completes the first snapshot if its work is done on all workers."""
        if self.is_done(totals):
            self.complete(self.queue.popleft(), totals)

    def is_done(self, totals: Mapping[str, float]) -> bool:
        """Whether the work for the first snapshot is done on all workers."""
        return totals[self.entry] == self._workers

    def failure(self) -> str | None:
        """Returns the error on this worker that must end the run, if any."""
        futures = ((snapshot, self.work(snapshot)) for snapshot in self.queue)
        finished = [future for snapshot, future in futures if future.done() and not self.tolerates(snapshot)]
        return next((with_code(error) for future in finished if (error := future.exception())), None)


class Failure:
    """Error of this worker that must end the run; the next all-reduce reports it to the others.

    Attributes:
        reason: the error with its code, if any is known.
        sources: functions that return such an error.
    """

    def __init__(self):
        self.reason: str | None = None
        self.sources: list[Callable[[], str | None]] = []

    def find(self) -> str | None:
        """Returns the first known error, if any; asks all sources until there is one."""
        self.reason = self.reason or next(filter(None, (source() for source in self.sources)), None)
        return self.reason

    @contextlib.contextmanager
    def recording_errors(self) -> Iterator[None]:
        """Context for operations of this worker alone, whose errors must reach all workers."""
        try:
            yield
        except (CheckpointError, OSError) as error:
            self.reason = with_code(error)


def started[T](future: Future[T] | None) -> Future[T]:
    """Returns a future that exists, because its work started before the snapshot entered the stage."""
    assert future is not None
    return future
