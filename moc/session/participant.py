"""What takes part in the vote of each iteration."""

from __future__ import annotations


class VoteParticipant:
    """A participant in the vote of each iteration.  The default contributes nothing."""

    def ballot(self) -> dict[str, float]:
        """What this worker contributes to the vote; all workers name the same values."""
        return {}

    def on_vote(self, tally: dict[str, float]) -> None:
        """Receives the sums over all workers, right before the update; may raise, on all workers alike."""
