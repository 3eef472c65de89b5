"""Nodes that have come: all workers leave at the end of the same iteration to meet them, so that none is dropped."""

from __future__ import annotations

from collections.abc import Mapping

from moc.faults import reach
from moc.runtime.results import settled
from moc.runtime.world import World
from moc.session.engine import VoteParticipant


class GuestsWait(Exception):
    """This worker leaves its generation, as all others do after the same iteration, to meet nodes that have come."""


class Guests(VoteParticipant):
    """Agrees on the iteration after which all workers leave; of one generation."""

    def __init__(self, world: World):
        self._world, self._wait = world, False

    def ballot(self) -> dict[str, float]:
        """Returns whether this worker has heard of nodes that are ready; others may not have yet."""
        return {"guests": float(self._world.job.guests_wait)}

    def on_vote(self, tally: Mapping[str, float]) -> None:
        """Has all workers leave after this iteration if any has heard of such nodes."""
        self._wait = tally["guests"] > 0

    def meet(self) -> None:
        """Leaves the generation between two iterations, if that was voted for.

        Raises:
            GuestsWait: on all workers; the device has done all that it was given.
            Aborted: another worker was lost meanwhile.
        """
        if self._wait:
            settled(self._world.device)
            reach("parting")
            raise GuestsWait
