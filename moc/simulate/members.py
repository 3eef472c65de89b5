"""Determines the number of nodes on which a job trains, and the slowdown of an iteration there."""

from __future__ import annotations

from dataclasses import dataclass

from moc.simulate.cost import Work
from moc.simulate.errors import SimulationError


@dataclass(frozen=True)
class Members:
    """Job that trains on any number of nodes between two limits; here n of N nodes take N / n times as long.

    Attributes:
        least: MIN; with fewer nodes the job waits.
        most: MAX, the job's nodes.
        grow_wait_s: wait for more nodes at the start, and after some arrive, unless all are present.
        grow_s: time from then until all train; nothing is replayed.

    Raises:
        ValueError: the numbers of nodes are no range.
    """

    least: int
    most: int
    grow_wait_s: float = 0.0
    grow_s: float = 0.0

    def __post_init__(self):
        if not 1 <= self.least <= self.most:
            raise SimulationError(
                f"a job of {self.most} nodes cannot continue with {self.least}. Fix: give 1 to {self.most} nodes",
                code="value-out-of-range",
            )

    def usable(self, nodes: int | None) -> int:
        """Returns how many of this many nodes (None for unlimited) train; 0 if they are too few."""
        there = self.most if nodes is None else min(nodes, self.most)
        return next((n for n in range(there, self.least - 1, -1) if n == self.most or self.fits(n)), 0)

    def fits(self, nodes: int) -> bool:
        """Returns whether the job can be divided among this many nodes."""
        return True

    def slowdown(self, nodes: int) -> float:
        """Returns the duration of an iteration on this many nodes, relative to the job's iteration."""
        return self.most / nodes


def steps(micro_batches: float, stages: int, vpp: int) -> float:
    """Returns the duration of a pipeline's iteration in micro batches: M + (S - 1) / v (:mod:`moc.simulate.cost`)."""
    return micro_batches + (stages - 1) / vpp


@dataclass(frozen=True)
class WholePipelines(Members):
    """Job whose pipelines get equally many micro batches of the same global batch.

    Attributes:
        work: work with the pipelines of all nodes.
        stages: stages of a pipeline.
        vpp: virtual stages of a stage.
    """

    work: Work = Work(pipelines=1)
    stages: int = 1
    vpp: int = 1

    def fits(self, nodes: int) -> bool:
        """Returns whether nodes form complete pipelines, and micro batches divide among them."""
        pipelines, rest = divmod(self.work.pipelines * nodes, self.most)
        return not rest and pipelines > 0 and not self.work.global_batch % (self.work.micro_batch * pipelines)

    def slowdown(self, nodes: int) -> float:
        """Returns :meth:`Members.slowdown`."""
        return self._steps(nodes) / self._steps(self.most)

    def _steps(self, nodes: int) -> float:
        pipelines = self.work.pipelines * nodes // self.most
        return steps(self.work.global_batch / self.work.micro_batch / pipelines, self.stages, self.vpp)
