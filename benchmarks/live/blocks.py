"""Blocks of iterations, of which every second one saves nothing: what saving costs, told by one job of itself.

Two jobs that do the same differ by percents for as long as they live, and one machine from one second to the next by
ten.  Within a job, and from one block of a few iterations to the next, both are alike.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median


@dataclass(frozen=True)
class Blocks:
    """When a job saves.

    Attributes:
        first: the iteration with which they begin; before it the job saves as it would.
        length: iterations of each; whole windows.
    """

    first: int
    length: int

    def number(self, iteration: int) -> int:
        """Of the block that an iteration is in; even ones save, and what is before the first has the number -2."""
        return -2 if iteration < self.first else (iteration - self.first) // self.length

    def saves(self, iteration: int) -> bool:
        """Whether this iteration may have a snapshot."""
        return self.number(iteration) % 2 == 0

    def overheads(self, seconds: Mapping[int, float]) -> list[float]:
        """Of each block that saves, how much longer its iterations take than those of its two neighbours.

        A snapshot begins at the end of its iteration, is copied while the next one is computed, and hashed meanwhile or
        a little later: so the first iteration of a block does not count, nor the second of one that does not save.

        Args:
            seconds: by iteration; as many as there were.

        Returns:
            Shares of an iteration, 0.02 for two percent, in order.
        """
        by_block: dict[int, list[float]] = {}
        for iteration, took in seconds.items():
            number = self.number(iteration)
            if number >= 0 and self.number(iteration - 1 - number % 2) == number:
                by_block.setdefault(number, []).append(took)
        means = {number: fmean(took) for number, took in by_block.items()}
        last = max(means, default=0)  # it may not be over
        inner = [number for number in means if number % 2 == 0 and 0 < number < last - 1]
        return [means[number] / fmean((means[number - 1], means[number + 1])) - 1 for number in inner]


def between(values: Sequence[float], share: float = 0.95, samples: int = 4000) -> tuple[float, float]:
    """Between what their median lies, in ``share`` of the samples that such values could have been (bootstrap)."""
    chance = random.Random(0)
    medians = sorted(median(chance.choices(values, k=len(values))) for _ in range(samples))
    outside = int((1 - share) / 2 * samples)
    return medians[outside], medians[-1 - outside]
