"""Lists the tensors that cross pipeline stage boundaries in an iteration, in order.

They follow from the schedule, so sender and receiver number them identically without communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Direction(Enum):
    """Direction of a crossing: activations go forward, their gradients backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Crossing:
    """Tensor that one stage sends to another, once per iteration.

    Attributes:
        chunk: model chunk of the sender that computes it.
        micro_batch: number of its micro batch, from 0.
    """

    direction: Direction
    chunk: int
    micro_batch: int

    @property
    def key(self) -> str:
        """Key of the tensor in logs."""
        return f"{self.direction.value} chunk {self.chunk} micro batch {self.micro_batch}"


@dataclass(frozen=True)
class Pipeline:
    """Pipeline stages and their order of computation.

    Chunk c of stage s is the part c * stages + s of the model.

    Attributes:
        stages: number of stages.
        turns: ``(micro batch, chunk)`` in the order of forward passes, identical on all stages.  Backward passes take
            the micro batches in the same order, and the chunks in reverse.
    """

    stages: int
    forward_order: tuple[tuple[int, int], ...]

    @cached_property
    def chunks(self) -> int:
        """Number of model chunks per stage."""
        return 1 + max(chunk for _, chunk in self.forward_order)

    def sender(self, stage: int, direction: Direction) -> int:
        """Returns the stage whose tensors a stage receives."""
        return (stage + (-1 if direction is Direction.FORWARD else 1)) % self.stages

    def sent_by(self, stage: int, direction: Direction) -> list[Crossing]:
        """Returns the tensors that a stage sends in one direction per iteration, in order."""
        if direction is Direction.FORWARD:
            last = (self.stages - 1, self.chunks - 1)
            return [Crossing(direction, chunk, i) for i, chunk in self.forward_order if (stage, chunk) != last]
        chunks = ((i, self.chunks - 1 - chunk) for i, chunk in self.forward_order)
        return [Crossing(direction, chunk, i) for i, chunk in chunks if (stage, chunk) != (0, 0)]

    def senders(self, stage: int) -> frozenset[int]:
        """Returns the stages from which a stage receives anything."""
        return frozenset(self.sender(stage, way) for way in Direction if self.received_by(stage, way))

    def received_by(self, stage: int, direction: Direction) -> list[Crossing]:
        """Returns the tensors that a stage receives in one direction per iteration, in order, named as by their sender.

        A stage sends to one other stage per direction, and channels keep their order.
        """
        return self.sent_by(self.sender(stage, direction), direction)
