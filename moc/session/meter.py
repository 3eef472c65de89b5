"""Measures the cost of snapshots, averaged over workers by the commit all-reduce."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping

from moc.policy import ObservedIteration, Transfer


class Meter:
    """Measurement of consecutive iterations, in seconds.

    Args:
        size: number of workers.
        waited: returns the time that this worker waited for other stages; called once per iteration.
    """

    def __init__(self, size: int, waited: Callable[[], float] = float):
        self._size, self._waited = size, waited
        # of this worker, until the next commit all-reduce
        self._iteration_s = self._stall_s = self._compute_s = self._bubble_s = 0.0
        self._started = self._busy = False
        self._begun_at = self._voted_at = time.perf_counter()
        self._heard = ObservedIteration(0.0)  # means over workers since the last iteration
        self._seen: ObservedIteration | None = None  # complete measurements of an iteration

    def completed(self, begun: float) -> ObservedIteration | None:
        """Records the end of an iteration that began at ``begun`` (``time.perf_counter``).

        Returns:
            The measurements of the previous iteration, if known and not returned yet.
        """
        self._begun_at, self._compute_s = begun, max(0.0, self._voted_at - begun)
        self._bubble_s = self._waited()
        seen, self._seen = self._seen, None
        return seen

    def ended(self, started: bool, busy: bool) -> None:
        """Records the end of all work of the iteration, and whether a snapshot ``started`` or is pending (``busy``)."""
        self._started, self._busy = started, busy
        self._iteration_s = time.perf_counter() - self._begun_at

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Context of training's waits for snapshots."""
        begun = time.perf_counter()
        yield
        self._stall_s += time.perf_counter() - begun

    def ballot(self) -> dict[str, float]:
        """Returns this worker's times; see :class:`moc.session.engine.VoteParticipant`."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return {
            "snapshot_stall_s": stall_s,
            "snapshot_iteration_s": self._iteration_s,
            "snapshot_compute_s": self._compute_s,
            "snapshot_bubble_s": self._bubble_s,
        }

    def on_vote(self) -> None:
        """Records that an iteration's gradients are reduced and its commit all-reduce is over."""
        self._voted_at = time.perf_counter()

    def hear(self, tally: Mapping[str, float]) -> float:
        """Receives the totals of any all-reduce, regular or extra; returns the mean stall since the last one."""
        stall_s = tally["snapshot_stall_s"] / self._size
        self._heard = dataclasses.replace(self._heard, stall_s=self._heard.stall_s + stall_s)
        return stall_s

    def copied(self, told: Mapping[str, float]) -> None:
        """Records that all workers have copied a snapshot."""
        self._heard = dataclasses.replace(self._heard, copied=self._mean(told, "snapshot_bytes", "snapshot_copy_s"))

    def replicated(self, amount: int, seconds: float, nodes: int) -> None:
        """Records that all nodes have a snapshot's copies: ``amount`` bytes over all nodes, ``seconds`` per node."""
        self._heard = dataclasses.replace(self._heard, replicated=Transfer(amount / nodes, seconds))

    def written(self, told: Mapping[str, float]) -> None:
        """Records that all workers have written a snapshot to storage."""
        written = self._mean(told, "snapshot_written_bytes", "snapshot_write_s")
        self._heard = dataclasses.replace(self._heard, written=written)

    def trained(self, tally: Mapping[str, float]) -> float | None:
        """Receives the totals after an iteration; returns its mean time in seconds.

        None for the first iteration, which allocates memory and connects.
        """
        if not tally["snapshot_iteration_s"]:
            return None
        self._seen = dataclasses.replace(
            self._heard,
            iteration_s=tally["snapshot_iteration_s"] / self._size,
            snapshot_started=self._started,
            snapshot_pending=self._busy,
            forward_backward_s=tally["snapshot_compute_s"] / self._size,
            bubble_s=tally["snapshot_bubble_s"] / self._size,
        )
        self._heard = ObservedIteration(0.0)
        return self._seen.iteration_s

    def _mean(self, told: Mapping[str, float], amount: str, seconds: str) -> Transfer:
        return Transfer(told[amount] / self._size, told[seconds] / self._size)
