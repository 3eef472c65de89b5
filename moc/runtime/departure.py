"""A node's planned departure from a job of MIN to MAX nodes, from the first SIGTERM to its launcher on.

The agent asks the controller, whose membership has the other workers take over the state
(:mod:`moc.runtime.membership`).  A second SIGTERM or the end of ``--drain-seconds`` makes the node an ordinarily lost
one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from moc.runtime.controller_link import NodeRemovedError

DUPLICATE_S = 2.0
"""Seconds from the first SIGTERM within which others are the same request: Slurm and a template may both send one."""


class DepartureError(NodeRemovedError):
    """End of a departing node before its state was moved."""


class Departure:
    """Request of one node to leave, its deadline, and the effect of further signals.

    Args:
        drain_s: seconds until the node ends in any case; 0 if SIGTERM stops the job.
        request: sends the request to the controller.
        end: ends the node, with the reason as a clause.

    Attributes:
        is_requested: whether the node waits for its release.
    """

    def __init__(self, drain_s: float, request: Callable[[], object], end: Callable[[str], object]):
        self._drain_s, self._request, self._end = drain_s, request, end
        self._requested_at = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self._is_refused = False
        self.is_requested = False

    def handle_signal(self) -> bool:
        """Handles a SIGTERM; returns False if it stops the job, as other signals do."""
        if not self._drain_s or self._is_refused:
            return False
        now = time.monotonic()
        if not self.is_requested:
            self.is_requested, self._requested_at = True, now
            self._deadline = asyncio.get_running_loop().call_later(self._drain_s, self._expire)
            self._request()
        elif now - self._requested_at >= DUPLICATE_S:
            self._end("has received another SIGTERM")
        return True

    def refuse(self) -> None:
        """Handles the controller's refusal: from now on, SIGTERM stops the job."""
        self._is_refused = True
        self.close()

    def close(self) -> None:
        """Cancels the deadline."""
        self.is_requested = False
        if self._deadline is not None:
            self._deadline.cancel()

    def _expire(self) -> None:
        self._end(f"has not been released for {self._drain_s:g} s (--drain-seconds)")
