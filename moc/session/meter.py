"""What snapshots cost, measured: each worker tells its own times with the vote, and all hear the means."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping

from moc.policy import Observed, Transfer


class Meter:
    """Of one iteration after the other.

    Args:
        size: workers of the job.
    """

    def __init__(self, size: int):
        self._size = size
        self._iteration_s = self._stall_s = self._compute_s = 0.0  # of this worker, until the next vote
        self._started = self._busy = False
        self._begun_at = self._voted_at = time.perf_counter()
        self._heard = Observed(0.0)  # means over workers, by all votes since the last iteration
        self._seen: Observed | None = None  # the same, when an iteration has been

    def completed(self, begun: float) -> Observed | None:
        """An iteration is complete; what the one before it was, if that is known and was not told yet.

        Args:
            begun: when it began, by ``time.perf_counter``.
        """
        self._begun_at, self._compute_s = begun, max(0.0, self._voted_at - begun)
        seen, self._seen = self._seen, None
        return seen

    def ended(self, started: bool, busy: bool) -> None:
        """All that belongs to the iteration is done.

        Args:
            started: the begin of a snapshot, too.
            busy: a snapshot is under way.
        """
        self._started, self._busy = started, busy
        self._iteration_s = time.perf_counter() - self._begun_at

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Training stands still meanwhile, because of snapshots."""
        begun = time.perf_counter()
        yield
        self._stall_s += time.perf_counter() - begun

    def ballot(self) -> dict[str, float]:
        """This worker's times; see :class:`moc.session.participant.VoteParticipant`."""
        stall_s, self._stall_s = self._stall_s, 0.0
        return {
            "snapshot_stall_s": stall_s,
            "snapshot_iteration_s": self._iteration_s,
            "snapshot_compute_s": self._compute_s,
        }

    def on_vote(self) -> None:
        """The gradients of an iteration are there, and its vote is over."""
        self._voted_at = time.perf_counter()

    def hear(self, tally: Mapping[str, float]) -> float:
        """A vote, of an iteration or besides; the seconds that training has stood still since the one before."""
        stall_s = tally["snapshot_stall_s"] / self._size
        self._heard = dataclasses.replace(self._heard, stall_s=self._heard.stall_s + stall_s)
        return stall_s

    def copied(self, told: Mapping[str, float]) -> None:
        """All workers have copied a snapshot."""
        self._heard = dataclasses.replace(self._heard, copied=self._mean(told, "snapshot_bytes", "snapshot_copy_s"))

    def replicated(self, amount: int, seconds: float, nodes: int) -> None:
        """All nodes have copied one to others: bytes of all of them, seconds of each."""
        self._heard = dataclasses.replace(self._heard, replicated=Transfer(amount / nodes, seconds))

    def written(self, told: Mapping[str, float]) -> None:
        """All workers have written one to storage."""
        written = self._mean(told, "snapshot_written_bytes", "snapshot_write_s")
        self._heard = dataclasses.replace(self._heard, written=written)

    def trained(self, tally: Mapping[str, float]) -> float | None:
        """The vote after an iteration; the seconds that this took.  None of the first: it allocates and connects."""
        if not tally["snapshot_iteration_s"]:
            return None
        self._seen = dataclasses.replace(
            self._heard,
            iteration_s=tally["snapshot_iteration_s"] / self._size,
            started=self._started,
            busy=self._busy,
            forward_backward_s=tally["snapshot_compute_s"] / self._size,
        )
        self._heard = Observed(0.0)
        return self._seen.iteration_s

    def _mean(self, told: Mapping[str, float], amount: str, seconds: str) -> Transfer:
        return Transfer(told[amount] / self._size, told[seconds] / self._size)
