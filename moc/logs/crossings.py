"""What crosses the boundaries of pipeline stages in an iteration, and in which order.

All of it follows from the schedule, so that sender and receiver number what passes between them alike without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Direction(Enum):
    """Which way a tensor crosses: activations go forward, gradients of them backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Crossing:
    """A tensor that one stage sends to another, once in every iteration.

    Attributes:
        direction: which way.
        chunk: model chunk of the sender that computes it.
        micro_batch: of which micro batch, from 0.
    """

    direction: Direction
    chunk: int
    micro_batch: int

    @property
    def key(self) -> str:
        """Of its tensor in logs."""
        return f"{self.direction.value} chunk {self.chunk} micro batch {self.micro_batch}"


@dataclass(frozen=True)
class Pipeline:
    """The pipeline stages, and the order in which they compute.

    Chunk c of stage s is the part c * stages + s of the model.

    Attributes:
        stages: how many there are.
        turns: ``(micro batch, chunk)`` in the order of forward passes, the same on all stages.  Backward passes take
            the micro batches in the same order, and the chunks from the other end.
    """

    stages: int
    turns: tuple[tuple[int, int], ...]

    @cached_property
    def chunks(self) -> int:
        """Model chunks of each stage."""
        return 1 + max(chunk for _, chunk in self.turns)

    def sender(self, stage: int, direction: Direction) -> int:
        """The stage from which a stage receives."""
        return (stage + (-1 if direction is Direction.FORWARD else 1)) % self.stages

    def sent(self, stage: int, direction: Direction) -> list[Crossing]:
        """What a stage sends in one direction in an iteration, in this order."""
        if direction is Direction.FORWARD:
            last = (self.stages - 1, self.chunks - 1)
            return [Crossing(direction, chunk, i) for i, chunk in self.turns if (stage, chunk) != last]
        chunks = ((i, self.chunks - 1 - chunk) for i, chunk in self.turns)
        return [Crossing(direction, chunk, i) for i, chunk in chunks if (stage, chunk) != (0, 0)]

    def feeds(self, stage: int) -> frozenset[int]:
        """The stages from which a stage receives anything."""
        return frozenset(self.sender(stage, way) for way in Direction if self.received(stage, way))

    def received(self, stage: int, direction: Direction) -> list[Crossing]:
        """What a stage receives in one direction in an iteration, in this order; named as its sender does.

        All that one stage sends in a direction goes to one other, and channels keep their order.
        """
        return self.sent(self.sender(stage, direction), direction)
