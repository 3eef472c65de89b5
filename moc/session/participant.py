"""Participants in the vote of each iteration."""

from __future__ import annotations


class VoteParticipant:
    """A participant in the vote of each iteration.  The default contributes nothing."""

    def ballot(self) -> dict[str, float]:
        """Returns this worker's contribution to the vote; the names are identical on all workers."""
        return {}

    def on_vote(self, tally: dict[str, float]) -> None:
        """Receives the sums over all workers, right before the update; may raise, then on all workers."""
