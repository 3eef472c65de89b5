"""Admits joining nodes: all workers leave after the same iteration, so that no iteration is discarded."""

from __future__ import annotations

from collections.abc import Mapping

from moc.faults import reach
from moc.runtime.device import synchronize_and_check
from moc.runtime.job import World
from moc.session.engine import VoteParticipant


class GuestsWait(Exception):
    """Exit from the generation, on all workers after the same iteration, to admit joining nodes."""


class Guests(VoteParticipant):
    """Agreement on the iteration after which all workers leave, for one generation."""

    def __init__(self, world: World):
        self._world, self._wait = world, False

    def ballot(self) -> dict[str, float]:
        """Returns whether this worker was notified that joining nodes are ready; others may not be yet."""
        return {"guests": float(self._world.job.has_scale_up_notice)}

    def on_vote(self, tally: Mapping[str, float]) -> None:
        """Makes all workers leave after this iteration if any was notified."""
        self._wait = tally["guests"] > 0

    def meet(self) -> None:
        """Leaves the generation between two iterations, if the commit all-reduce decided so.

        Raises:
            GuestsWait: on all workers; the device has completed its enqueued work.
            Aborted: another worker was lost meanwhile.
        """
        if self._wait:
            synchronize_and_check(self._world.device)
            reach("parting")
            raise GuestsWait
