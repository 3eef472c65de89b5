"""From which checkpoints a job can go on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MEMORY, STORAGE = "memory", "storage"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be complete.

    Attributes:
        iteration: iterations completed.
        tier: :data:`MEMORY` or :data:`STORAGE`.
    """

    iteration: int
    tier: str


def candidates(
    memories: Iterable[Mapping[int, tuple[int, Iterable[str]]]], storage: Iterable[int], only: int | None = None
) -> list[Candidate]:
    """The checkpoints to try, the newest first, and of one iteration memory first, since it is faster.

    Args:
        memories: of each node, by iteration: how many ranks wrote, and the names of the files that it has.
        storage: iterations that storage holds.
        only: leave out all other iterations.
    """
    found = {Candidate(iteration, STORAGE) for iteration in storage}
    names: dict[tuple[int, int], set[str]] = defaultdict(set)
    for memory in memories:
        for iteration, (writers, files) in memory.items():
            names[iteration, writers].update(files)
    found |= {Candidate(iteration, MEMORY) for (iteration, writers), files in names.items() if len(files) == writers}
    wanted = [candidate for candidate in found if only in (None, candidate.iteration)]
    return sorted(wanted, key=lambda candidate: (-candidate.iteration, candidate.tier))
