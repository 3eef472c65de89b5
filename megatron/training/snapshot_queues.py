"""The snapshots that are not everywhere yet where they are to go, and how far this worker has come with them."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from megatron.training.snapshot_peers import Copied
from moc.policy import SnapshotPlan
from moc.snapshot.saver import Snapshot

_LISTEN_S = 0.5


@dataclass(frozen=True)
class Taken:
    """One that is not everywhere yet where it is to go.

    Attributes:
        plan: what it holds.
        storage: what of it goes to storage; None if nothing does.
        state: what is not a tensor.
        snapshot: this worker's part.
        copied: done when this node has the copies of other nodes' parts that it keeps; without peers None.
    """

    plan: SnapshotPlan
    storage: SnapshotPlan | None
    state: dict
    snapshot: Snapshot
    copied: Future[Copied] | None = None


@dataclass(frozen=True)
class Queues:
    """All of them; each queue is served in the order in which snapshots were taken, the same on all workers.

    Attributes:
        copying: of which some worker may not have its part yet.
        replicating: of which some node may not have its copies yet.
        writing: of which some worker's part may not be in storage yet.
    """

    copying: deque[Taken] = field(default_factory=deque)
    replicating: deque[Taken] = field(default_factory=deque)
    writing: deque[Taken] = field(default_factory=deque)

    def __bool__(self) -> bool:
        return bool(self.copying or self.replicating or self.writing)

    def ballot(self) -> dict[str, float]:
        """How far this worker has come with the first of each queue."""
        copying, writing = _head(self.copying), _head(self.writing)
        copied = copying is not None and copying.snapshot.sealed.done()
        written = writing is not None and writing.snapshot.persisted.done()
        replicating, replicated = self._replicated()
        return {
            "snapshot_copied": float(copied),
            "snapshot_written": float(written),
            "snapshot_bytes": float(copying.snapshot.layout.nbytes if copied else 0),
            "snapshot_copy_s": copying.snapshot.capture.seconds if copied and not _failed(copying) else 0.0,
            "snapshot_seal_s": copying.snapshot.seal_s if copied else 0.0,
            "snapshot_written_bytes": float(writing.snapshot.persisted_bytes if written else 0),
            "snapshot_write_s": writing.snapshot.persist_s if written else 0.0,
            "snapshot_replicated": float(replicating),
            "snapshot_replicated_bytes": float(replicated.bytes),
            "snapshot_replicate_s": replicated.seconds,
        }

    def wait(self) -> None:
        """Returns when this worker has come further than it had, or after a moment."""
        heads = [_head(self.copying), _head(self.writing)]
        wait([taken.snapshot.sealed for taken in heads if taken])
        if heads[0] is None:
            # of a node that is lost meanwhile, a worker hears in the vote alone
            wait([taken.copied for taken in list(self.replicating)[:1]], timeout=_LISTEN_S)
            if heads[1] is not None and not self.replicating:
                wait([heads[1].snapshot.persisted])

    def failure(self) -> str | None:
        """What has gone wrong on this worker, if anything has."""
        futures = [taken.snapshot.sealed for taken in self.copying]
        futures += [taken.snapshot.persisted for taken in self.writing]
        futures += [taken.copied for taken in self.replicating]
        return next((str(future.exception()) for future in futures if future.done() and future.exception()), None)

    def _replicated(self) -> tuple[bool, Copied]:
        """Whether this node has its copies of the oldest snapshot that waits for them, and what they took."""
        head = _head(self.replicating)
        if head is None or not head.copied.done():
            return False, Copied()
        return True, Copied() if head.copied.exception() else head.copied.result()


def _head(queue: deque[Taken]) -> Taken | None:
    return queue[0] if queue else None


def _failed(taken: Taken) -> bool:
    return taken.snapshot.sealed.exception() is not None
