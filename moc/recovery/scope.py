"""Which pipeline stages compute again when workers are lost: as few as upstream logs allow.

MoEvement, section 3.4 and Appendix A: the stages of the lost workers; what they need from others comes from logs.  Of
neighbouring stages that compute again together, what passes between them is computed as well, so no log of it is
needed; stages that are apart do not know of each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Logs:
    """The upstream logs that there are.

    Attributes:
        stages: by rank, its pipeline stage.
        feeds: by stage, the stages from which it receives.
        kept: by rank, the iterations of which its log is whole, counted from 1.
        reduced: by rank, the iteration of which it has the reduced gradients; of others there is none.
        records: iterations of which it is known how they were clipped.
    """

    stages: Mapping[int, int]
    feeds: Mapping[int, Collection[int]]
    kept: Mapping[int, Collection[int]]
    reduced: Mapping[int, int] = field(default_factory=dict)
    records: Collection[int] = frozenset()


def scope(lost: Collection[int], iterations: Collection[int], logs: Logs) -> frozenset[int] | None:
    """The stages that compute iterations again: those that are lost, and those whose logs would be needed and are not.

    Args:
        lost: stages of which some worker does not have its state.
        iterations: to compute again, counted from 1.
        logs: that there are.

    Returns:
        None where that would be all of them: then nobody keeps its state.
    """
    whole = {
        stage
        for stage in logs.feeds
        if all(set(iterations) <= set(logs.kept.get(rank, ())) for rank, other in logs.stages.items() if other == stage)
    }
    stages = frozenset(lost)
    while wider := {feed for stage in stages for feed in logs.feeds[stage]} - whole - stages:
        stages |= wider
    return stages if len(stages) < len(logs.feeds) else None
