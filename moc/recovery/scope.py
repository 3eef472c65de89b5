"""Which pipeline stages compute again when workers are lost: as few as upstream logs allow, and as little.

MoEvement, section 3.4 and Appendix A: the stages of the lost workers; what they need from others comes from logs.  Of
neighbouring stages that compute an iteration again together, what passes between them is computed as well, so no log of
it is needed; stages that are apart do not know of each other.  A stage whose replay was cut off by another loss has
computed some of it already, and need not do that again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Replayed:
    """How far a worker had come with computing again when that was cut off.

    Attributes:
        iteration: of its state.
        frozen: operators that are not of this iteration, since they had not been loaded in full before it.
        reduced: it has the reduced gradients of the next iteration, too.
    """

    iteration: int
    frozen: frozenset[str] = frozenset()
    reduced: bool = False


@dataclass(frozen=True)
class Logs:
    """The upstream logs that there are, and what has been computed by them.

    Attributes:
        stages: by rank, its pipeline stage.
        feeds: by stage, the stages from which it receives.
        kept: by rank, the iterations of which its log is whole, counted from 1.
        reduced: by rank, the iteration of which it has the reduced gradients; of others there is none.
        records: iterations of which it is known how they were clipped.
        replayed: by rank, how far it had come with computing again, if it was called away from that.
    """

    stages: Mapping[int, int]
    feeds: Mapping[int, Collection[int]]
    kept: Mapping[int, Collection[int]]
    reduced: Mapping[int, int] = field(default_factory=dict)
    records: Collection[int] = frozenset()
    replayed: Mapping[int, Replayed] = field(default_factory=dict)

    def of(self, stage: int) -> list[int]:
        """The ranks of a stage."""
        return [rank for rank, other in self.stages.items() if other == stage]

    def have(self, stage: int, iterations: Iterable[int]) -> bool:
        """Whether a stage can serve iterations."""
        wanted = set(iterations)
        return all(wanted <= set(self.kept.get(rank, ())) for rank in self.of(stage))


def scope(
    lost: Collection[int], since: int, until: int, logs: Logs, ahead: Mapping[int, int] | None = None
) -> dict[int, int] | None:
    """The stages that compute again, up to the iteration at which the others are, and from where on.

    They are those that are lost, and those that have not the logs which others need.  A stage that is ahead begins
    where it is; up to there it serves its logs, as those do that keep their state.

    Args:
        lost: stages of which some worker does not have its state.
        since: iterations completed where the checkpoint begins that they go back to.
        until: iterations completed where the others are.
        logs: that there are.
        ahead: by stage the iterations completed, of those whose replay was cut off; after ``since``.

    Returns:
        By stage, the iterations completed where it begins; None where that would be all of them: then nobody keeps its
        state.
    """
    begins = dict.fromkeys(lost, since) | dict(ahead or {})

    def serves(feed: int, begin: int) -> bool:
        """Whether one can serve what another computes from ``begin`` on, until it computes itself."""
        return logs.have(feed, range(begin + 1, begins.get(feed, until) + 1))

    while joins := {feed for stage, begin in begins.items() for feed in logs.feeds[stage] if not serves(feed, begin)}:
        begins |= dict.fromkeys(joins, since)
    return begins if len(begins) < len(logs.feeds) else None
