"""Defines named fault injection points; each module reports when it reaches one.

Without a listener (:mod:`moc.runtime.fault_injection`), points have no effect.
"""

from __future__ import annotations

from collections.abc import Callable

STEP = {
    "start": "an iteration begins",
    "forward_backward": "a micro batch is about to be computed, of this iteration or of an evaluation",
    "after_reduce": "gradients are reduced",
    "before_commit": "this worker is about to contribute to the commit all-reduce",
    "after_commit": "the totals of the commit all-reduce are known, and nothing is updated",
    "after_apply": "the update is done; with ZeRO-1, weights are not gathered yet",
}
AFTER = {
    "completed": "the iteration is committed, and nothing that follows it has happened",
    "evaluating": "a batch of an evaluation is about to be computed",
    "saving": "a dense checkpoint is about to be saved",
}
SNAPSHOT = {
    "gradient_staged": "the gradients of a snapshot may be cleared, and perhaps nothing of it is in host memory",
    "snapshot_copying": "a snapshot is being copied, in a background thread",
    "snapshot_finalized": "this worker's part of a snapshot is finalized, and the others do not know it yet",
    "snapshot_committed": "all know that a snapshot is finalized, and one worker of each node commits it in memory",
    "replicating": "a snapshot is being copied to other nodes",
    "peers_committed": "a node has its copies of a snapshot, and the others do not know it yet; on the node's leader",
    "persisting": "this worker's part of a snapshot or of a Megatron-LM checkpoint is in storage, and not reported yet",
    "committed": "a snapshot is committed in storage, and older ones still exist; only on the first worker",
}
RECOVERY = {
    "rebuilding": "a worker has built its model, and has no data yet",
    "ready": "a worker has reported that it is ready, and waits for the others",
    "loading": "a worker is about to fill its state from a snapshot",
    "folding": "some gradients of a snapshot are applied to the loaded experts, and others are not yet",
    "replaying": "a worker is about to compute an iteration again",
    "loaded": "a worker has its state again",
}
ELASTIC = {
    "draining": "all workers have agreed to connect to new nodes: this one is about to leave its generation",
    "rebalancing": "state moves: this worker has received its new parts (of a layer, or of shards), not yet in use",
    "passing_on": "state moves: workers have received parts of it, and are about to forward them to one another",
    "landed": "state moves: all workers have their new parts, and this one is about to use them",
}
POINTS = STEP | AFTER | SNAPSHOT | RECOVERY | ELASTIC
"""Meaning of each point, by name."""
FORMER_NAMES = {
    "before_vote": "before_commit",
    "after_vote": "after_commit",
    "snapshot_sealed": "snapshot_finalized",
    "snapshot_published": "snapshot_committed",
    "peers_published": "peers_committed",
    "published": "committed",
    "meeting": "ready",
    "parting": "draining",
}
"""Names of points in earlier releases, which faults may still use, with the current names."""

Listener = Callable[[str, "int | None"], None]
_listener: Listener | None = None


def reach(point: str, iteration: int | None = None) -> None:
    """Reports that this worker is at one of the :data:`POINTS`; thread-safe, and without cost if there is no listener.

    The iteration counts from 1: the one that begins at ``start``, the one replayed at ``replaying``, otherwise the
    last that began.
    """
    if _listener is not None:
        _listener(point, iteration)


def on_reach(listener: Listener | None) -> None:
    """Sets the function called at each point with the arguments of :func:`reach`; None removes it."""
    global _listener
    _listener = listener
