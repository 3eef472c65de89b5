"""Chooses the fewest pipeline stages, and the shortest replay, that upstream logs allow after a loss.

MoEvement, section 3.4 and Appendix A: the stages of lost workers replay, and logs provide the data that other stages
sent them. Adjacent stages that replay an iteration together recompute the data between them, so they need no log of it.
Separate stages are independent. A stage whose replay was interrupted by another loss continues from its progress.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Replayed:
    """Progress of a worker's interrupted replay.

    Attributes:
        iteration: of its state.
        frozen: operators behind this iteration, since they had not been loaded in full before it.
        reduced: it also has the reduced gradients of the next iteration.
    """

    iteration: int
    frozen: frozenset[str] = frozenset()
    reduced: bool = False


@dataclass(frozen=True)
class Logs:
    """Available upstream logs, and the progress of replays.

    Attributes:
        stages: by rank, its pipeline stage.
        feeds: by stage, the stages that it receives from.
        kept: by rank, the iterations with a complete log, counted from 1.
        reduced: by rank, the iteration whose reduced gradients it has; absent if there is none.
        records: iterations whose step record is known.
        replayed: by rank, the progress of its interrupted replay, if any.
    """

    stages: Mapping[int, int]
    feeds: Mapping[int, Collection[int]]
    kept: Mapping[int, Collection[int]]
    reduced: Mapping[int, int] = field(default_factory=dict)
    records: Collection[int] = frozenset()
    replayed: Mapping[int, Replayed] = field(default_factory=dict)

    def of(self, stage: int) -> list[int]:
        """Returns the ranks of a stage."""
        return [rank for rank, other in self.stages.items() if other == stage]

    def have(self, stage: int, iterations: Iterable[int]) -> bool:
        """Returns whether a stage has its logs of iterations."""
        wanted = set(iterations)
        return all(wanted <= set(self.kept.get(rank, ())) for rank in self.of(stage))


def scope(
    lost: Collection[int], since: int, until: int, logs: Logs, ahead: Mapping[int, int] | None = None
) -> dict[int, int] | None:
    """Returns the stages that replay up to the iteration of the others, with the iteration where each starts.

    These are the lost stages, and stages without logs that others need. A stage that is ahead starts from its progress;
    it serves its logs for earlier iterations, like the stages that keep their state.

    Args:
        lost: stages with a worker that lacks its state.
        since: iterations completed at the checkpoint that they return to.
        until: iterations completed by the other stages.
        logs: that are available.
        ahead: by stage, iterations completed in an interrupted replay; after ``since``.

    Returns:
        None if all stages would replay, and none would keep its state.
    """
    begins = dict.fromkeys(lost, since) | dict(ahead or {})

    def serves(feed: int, begin: int) -> bool:
        """Returns whether a stage can serve another's replay from ``begin`` on, until it replays itself."""
        return logs.have(feed, range(begin + 1, begins.get(feed, until) + 1))

    while joins := {feed for stage, begin in begins.items() for feed in logs.feeds[stage] if not serves(feed, begin)}:
        begins |= dict.fromkeys(joins, since)
    return begins if len(begins) < len(logs.feeds) else None
