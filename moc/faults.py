"""Defines named fault injection points; each module reports when it reaches one.

Without a listener (:mod:`moc.runtime.fault_injection`), points have no effect.
"""

from __future__ import annotations

from collections.abc import Callable

STEP = {
    "start": "an iteration begins",
    "forward_backward": "a micro batch is about to be computed, of this iteration or of an evaluation",
    "after_reduce": "gradients are reduced",
    "before_vote": "this worker is about to vote",
    "after_vote": "the vote is known, and nothing is updated",
    "after_apply": "the update is done; with ZeRO-1, weights are not gathered yet",
}
AFTER = {
    "completed": "the iteration is committed, and nothing that follows it has happened",
    "evaluating": "a batch of an evaluation is about to be computed",
    "saving": "a dense checkpoint is about to be saved",
}
SNAPSHOT = {
    "gradient_staged": "the gradients of a snapshot are copied, and perhaps nothing else of it",
    "snapshot_copying": "a snapshot is being copied, in a thread beside training",
    "snapshot_sealed": "this worker's part of a snapshot is hashed, and the others do not know it yet",
    "snapshot_published": "all know that a snapshot is sealed, and one worker of each node publishes it in memory",
    "replicating": "a snapshot is being copied to other nodes",
    "peers_published": "a node has its copies of a snapshot, and nobody knows yet; by the worker that leads it",
    "persisting": "this worker's part of a snapshot or of a Megatron-LM checkpoint is in storage, and not reported yet",
    "published": "a snapshot is published in storage, and older ones are still there; by the first worker alone",
}
RECOVERY = {
    "rebuilding": "a worker builds: it has its model, and no data yet",
    "meeting": "a worker has said that it is here, and waits for the others",
    "loading": "a worker is about to fill its state from a snapshot",
    "folding": "some gradients of a snapshot are in the loaded experts, and more are about to be",
    "replaying": "a worker is about to compute an iteration again",
    "loaded": "a worker has its state again",
}
ELASTIC = {
    "parting": "nodes have come, and all workers have voted to meet them: this one is about to leave its generation",
    "rebalancing": "state moves: what this worker is to hold anew (of a layer, or of shards) is here, and not in use",
    "passing_on": "state moves: workers have got parts of it, and are about to pass them on to one another",
    "landed": "state moves: all workers have what they will hold, and this one is about to take it into use",
}
POINTS = STEP | AFTER | SNAPSHOT | RECOVERY | ELASTIC
"""Meaning of each point, by name."""

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
