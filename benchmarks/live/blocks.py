"""Blocks of iterations, of which every second one saves nothing: what saving costs, told by one job of itself.

Two jobs that do the same differ by percents for as long as they live, and one machine from one second to the next by
ten.  Within a job, and from one block of a few iterations to the next, both are alike.  As a program, this is
``pretrain_gpt_moe.py`` that saves so, with the numbers of :class:`Blocks` in ``SAVING_FROM`` and ``SAVING_FOR``.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any


@dataclass(frozen=True)
class Blocks:
    """When a job saves."""

    first: int  # the iteration with which they begin; before it the job saves as it would
    length: int  # iterations of each; whole windows

    def number(self, iteration: int) -> int:
        """Of the block that an iteration is in; even ones save, and what is before the first has the number -2."""
        return -2 if iteration < self.first else (iteration - self.first) // self.length

    def saves(self, iteration: int) -> bool:
        """Whether this iteration may have a snapshot."""
        return self.number(iteration) % 2 == 0

    def overheads(self, seconds: Mapping[int, float]) -> list[float]:
        """Of each block that saves, how much longer its iterations take than those of its two neighbours, as a share.

        A snapshot begins at the end of its iteration, is copied while the next one is computed, and hashed meanwhile or
        a little later: so the first iteration of a block does not count, nor the second of one that does not save.
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


def in_blocks(plan, blocks: Blocks):
    """The method ``plan`` of a policy, which is asked only where the block saves."""
    return lambda self, iteration, *load: plan(self, iteration, *load) if blocks.saves(iteration) else None


if __name__ == "__main__":
    import pretrain_gpt_moe as program
    from moc.policy import POLICIES

    for kind in POLICIES.values():
        policy: Any = kind  # of which a method is replaced
        policy.plan = in_blocks(policy.plan, Blocks(int(os.environ["SAVING_FROM"]), int(os.environ["SAVING_FOR"])))
    sys.exit(program.main())
