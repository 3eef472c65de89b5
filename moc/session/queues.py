"""Queues the snapshots that have not reached every tier yet, and reports this worker's progress with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import takewhile

from moc.errors import with_code
from moc.policy import SnapshotPlan
from moc.recovery.inventory import COPIED
from moc.session.peers import Copied
from moc.session.storage_health import tolerable
from moc.snapshot.saver import Snapshot
from moc.store.errors import InsufficientMemoryError

PER_VOTE = 2
"""Snapshots of a queue that one all-reduce can report: one more than can start per iteration.  Otherwise one late
snapshot delays all later ones."""
BEYOND = 2
"""Outstanding snapshots beyond the number of buffers; each waits for its manifest or its removal."""
_LISTEN_S = 0.5


def may_begin(outstanding: int, buffers: int) -> bool:
    """Returns whether another snapshot may begin without a memory tier.

    At most ``buffers`` + :data:`BEYOND` are then outstanding: begun, and neither committed nor given up.

    Args:
        outstanding: number of such snapshots.
        buffers: number of buffers.
    """
    return outstanding < buffers + BEYOND


def window_may_begin(writes: bool, ending: int) -> bool:
    """Returns whether a window, with a memory tier, may go to storage; otherwise it skips storage.

    At most one window and one snapshot are then outstanding, fewer than there are buffers.

    Args:
        writes: storage may lack a worker's part of an outstanding snapshot.
        ending: number of snapshots that wait for their manifest or their removal.
    """
    return not writes and ending < BEYOND


@dataclass(frozen=True)
class Taken:
    """Snapshot that has not reached every tier yet.

    Attributes:
        plan: plan of the snapshot.
        storage: the part that goes to storage; None if nothing does.
        state: the non-tensor state.
        snapshot: this worker's part.
        copied: done when this node has its copies of other nodes' parts; None without peers.
        published: done when the snapshot is committed in storage, or after a failure its files are removed; finished on
            workers other than rank 0.
    """

    plan: SnapshotPlan
    storage: SnapshotPlan | None
    state: dict
    snapshot: Snapshot
    copied: Future[Copied] | None = None
    published: Future[None] | None = None

    @property
    def state_in_memory(self) -> dict:
        """The state, with the names of the operators that other nodes receive copies of, if not all."""
        return self.state if self.plan.remote is None else {**self.state, COPIED: list(self.plan.remote)}


@dataclass(frozen=True)
class Queues:
    """Queues of snapshots; each is served in the order of the snapshots, which is identical on all workers.

    Attributes:
        copying: some worker may not have copied its part yet.
        replicating: some node may not have its copies yet.
        writing: some worker's part may not be in storage yet.
        publishing: all parts are in storage, but the manifest may not be.
        removing: could not be saved to storage, where their files may remain.
    """

    copying: deque[Taken] = field(default_factory=deque)
    replicating: deque[Taken] = field(default_factory=deque)
    writing: deque[Taken] = field(default_factory=deque)
    publishing: deque[Taken] = field(default_factory=deque)
    removing: deque[Taken] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self.copying or self.replicating or self.outstanding)

    @property
    def to_storage(self) -> list[Taken]:
        """Snapshots on their way to storage, the oldest first; others may follow."""
        return [*self.publishing, *self.writing]

    @property
    def outstanding(self) -> list[Taken]:
        """Snapshots for storage that have begun, and are neither committed nor given up.

        Storage may have files of them.  They count from their beginning, before their copies are done.
        """
        return [*self.removing, *self.to_storage]

    def not_safe(self, safe_in_memory: bool) -> list[Taken]:
        """Returns the snapshots that may still be lost; if memory is durable, without those waiting for storage."""
        return [*self.copying, *self.replicating, *(() if safe_in_memory else self.to_storage)]

    def ballot(self) -> dict[str, float]:
        """Returns this worker's progress with the first snapshots of each queue; :func:`told_of` is the inverse."""
        copied = _done(self.copying, lambda taken: taken.snapshot.sealed)
        written = _done(self.writing, lambda taken: taken.snapshot.persisted)
        replicated = _done(self.replicating, lambda taken: taken.copied)
        published = _done(self.publishing, lambda taken: taken.published)
        removed = _done(self.removing, lambda taken: taken.published)
        told = {}
        for place in range(PER_VOTE):
            come = _come(_at(copied, place), _at(replicated, place), _at(written, place))
            come |= _come_to_storage(_at(written, place), _at(published, place), _at(removed, place))
            told |= {f"{what}[{place}]": value for what, value in come.items()}
        return told

    def wait(self, for_storage: bool) -> None:
        """Waits for progress of this worker; waits for other nodes and for storage are short.

        Storage may hang, and is waited for only if the caller cannot continue without it (``for_storage``).
        """
        if self.copying:
            wait([self.copying[0].snapshot.sealed])
        elif self.replicating:  # only the all-reduce reports a lost node
            wait([started(self.replicating[0].copied)], timeout=_LISTEN_S)
        elif for_storage:
            heads = [started(taken.snapshot.persisted) for taken in list(self.writing)[:1]]
            heads += [started(queue[0].published) for queue in (self.publishing, self.removing) if queue]
            wait([one for one in heads if not one.done()], timeout=_LISTEN_S, return_when=FIRST_COMPLETED)

    def failure(self) -> str | None:
        """Returns the error on this worker that must end the run, if any."""
        futures: list[Future] = [taken.snapshot.sealed for taken in self.copying if no_room(taken) is None]
        futures += [started(taken.copied) for taken in self.replicating]
        to_storage: list[Future] = [started(taken.snapshot.persisted) for taken in self.writing]
        to_storage += [started(taken.published) for taken in (*self.publishing, *self.removing)]
        futures += [future for future in to_storage if not tolerable(future)]
        errors = (future.exception() for future in futures if future.done())
        return next((with_code(error) for error in errors if error), None)


def told_of(tally: Mapping[str, float], place: int) -> dict[str, float]:
    """Returns the totals for the snapshots at a position of their queues when the all-reduce started."""
    return {name.removesuffix(f"[{place}]"): value for name, value in tally.items() if name.endswith(f"[{place}]")}


def no_room(taken: Taken) -> InsufficientMemoryError | None:
    """Returns the error if this worker lacked memory for its part of a snapshot, which is then to be abandoned."""
    sealed = taken.snapshot.sealed
    error = sealed.exception() if sealed.done() and not sealed.cancelled() else None
    return error if isinstance(error, InsufficientMemoryError) else None


def _done(queue: Iterable[Taken], future: Callable[[Taken], Future | None]) -> list[Taken]:
    """Returns the snapshots at the front of a queue whose work is done."""
    return list(takewhile(lambda taken: started(future(taken)).done(), queue))


def started[T](future: Future[T] | None) -> Future[T]:
    """Returns a future that exists, because its work started before the snapshot was queued."""
    assert future is not None
    return future


def _come(copied: Taken | None, replicated: Taken | None, written: Taken | None) -> dict[str, float]:
    copied_by = None if replicated is None else started(replicated.copied)
    copies = Copied() if copied_by is None or copied_by.exception() else copied_by.result()
    return {
        "snapshot_copied": float(copied is not None),
        "snapshot_no_room": float(copied is not None and no_room(copied) is not None),
        "snapshot_bytes": float(copied.snapshot.layout.nbytes if copied else 0),
        "snapshot_copy_s": copied.snapshot.capture.seconds if copied and not _failed(copied) else 0.0,
        "snapshot_bubble_bytes": float(copied.snapshot.capture.bubble_bytes if copied and not _failed(copied) else 0),
        "snapshot_seal_s": copied.snapshot.seal_s if copied else 0.0,
        "snapshot_replicated": float(replicated is not None),
        "snapshot_replicated_bytes": float(copies.bytes),
        "snapshot_alike_bytes": float(copies.alike),
        "snapshot_not_alike": float(bool(copies.trouble)),
        "snapshot_copies_missing": float(len(copies.missing)),
        "snapshot_replicate_s": copies.seconds,
        "snapshot_written": float(written is not None),
        "snapshot_written_bytes": float(written.snapshot.persisted_bytes if written else 0),
        "snapshot_write_s": written.snapshot.persist_s if written else 0.0,
        "snapshot_retries": float(written.snapshot.retries if written else 0),
    }


def _come_to_storage(written: Taken | None, published: Taken | None, removed: Taken | None) -> dict[str, float]:
    return {
        "snapshot_unwritten": float(written is not None and tolerable(started(written.snapshot.persisted)) is not None),
        "snapshot_published": float(published is not None),
        "snapshot_unpublished": float(published is not None and tolerable(started(published.published)) is not None),
        "snapshot_removed": float(removed is not None),
    }


def _at(queue: Sequence[Taken], place: int) -> Taken | None:
    return queue[place] if place < len(queue) else None


def _failed(taken: Taken) -> bool:
    return taken.snapshot.sealed.exception() is not None
