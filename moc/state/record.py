"""What is known of an iteration beside its tensors: how far the run is, and what the iteration decided."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepRecord:
    """What an iteration decided; with the reduced gradients it makes the iteration repeatable.

    Attributes:
        iteration: number of the iteration, counted from 1 when it is complete.
        loss: mean language-model loss over the tokens of the global batch.
        grad_norm: norm of the whole gradient before clipping; inf if the iteration was skipped.
        loss_scale: factor that fp16's loss was multiplied by.
        skipped: the norm was not finite, so no parameter moved.
        tokens: tokens that the loss was averaged over.
        learning_rate: rate of the update.
        samples: samples consumed by this iteration.
        zeros: gradient elements that are zero, if counted.
        params_norm: norm of all weights before the update, if wanted.
        stop: a worker asked to stop after this iteration.
        auxiliary: mean of each router loss over layers and micro batches.
    """

    iteration: int
    loss: float
    grad_norm: float
    loss_scale: float
    skipped: bool
    tokens: int
    learning_rate: float
    samples: int
    zeros: int | None = None
    params_norm: float | None = None
    stop: bool = False
    auxiliary: dict[str, float] = field(default_factory=dict)


class Records:
    """The step records of late, which replays of their iterations will need."""

    def __init__(self, most: int = 1024):
        self._most, self._records = most, {}

    def add(self, record: StepRecord) -> None:
        """Keeps a record; the oldest go."""
        self._records[record.iteration] = record
        self._records.pop(record.iteration - self._most, None)

    def iterations(self) -> list[int]:
        """Of which there is a record."""
        return sorted(self._records)

    def of(self, iterations: Iterable[int]) -> list[StepRecord]:
        """Those of some iterations.

        Raises:
            KeyError: there is none of one of them.
        """
        return [self._records[iteration] for iteration in iterations]


@dataclass(frozen=True)
class Position:
    """How far a run has come; iterations and samples completed, and of these iterations those skipped."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0

    def after(self, record: StepRecord) -> Position:
        """The position after an iteration."""
        return Position(
            iteration=record.iteration,
            consumed_samples=self.consumed_samples + record.samples,
            skipped_iterations=self.skipped_iterations + record.skipped,
        )


def mean_loss(sums: dict[str, float]) -> float:
    """The mean over tokens, of sums over all workers."""
    return sums["loss_sum"] / max(sums["loss_tokens"], 1.0)
