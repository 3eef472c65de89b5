"""Step records and positions: the state of an iteration apart from its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from moc.files.decode import Amount, Count, Positive


@dataclass(frozen=True)
class StepRecord:
    """The decisions of an iteration: with its reduced gradients, they are sufficient to replay it.

    Attributes:
        iteration: number of iterations completed, including this one.
        loss: mean language-model loss over the tokens of the global batch.
        grad_norm: global gradient norm before clipping; inf if the iteration was skipped.
        loss_scale: factor on the fp16 loss.
        skipped: the norm was not finite, so no update was made.
        tokens: tokens averaged in the loss.
        learning_rate: learning rate of the update.
        samples: samples consumed by this iteration.
        zeros: number of zero gradient elements, if counted.
        params_norm: norm of all weights before the update, if requested.
        stop: a worker asked to stop after this iteration.
        auxiliary: each router loss, averaged over layers and micro batches.
    """

    iteration: Count
    loss: float
    grad_norm: float
    loss_scale: Positive
    skipped: bool
    tokens: Count
    learning_rate: Amount
    samples: Count
    zeros: Count | None = None
    params_norm: float | None = None
    stop: bool = False
    auxiliary: dict[str, float] = field(default_factory=dict)


class Records:
    """The most recent step records, kept for replay."""

    def __init__(self, max_records: int = 1024):
        self._max_records, self._records = max_records, {}

    def add(self, record: StepRecord) -> None:
        """Adds a record, and drops the oldest beyond the limit."""
        self._records[record.iteration] = record
        self._records.pop(record.iteration - self._max_records, None)

    def iterations(self) -> list[int]:
        """Returns the iterations that have a record, ascending."""
        return sorted(self._records)

    def of(self, iterations: Iterable[int]) -> list[StepRecord]:
        """Returns the records of some iterations.

        Raises:
            KeyError: an iteration has no record.
        """
        return [self._records[iteration] for iteration in iterations]


@dataclass(frozen=True)
class Position:
    """Progress of a run: iterations completed, samples consumed, and iterations skipped among those completed."""

    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0

    def after(self, record: StepRecord) -> Position:
        """Returns the position after an iteration."""
        consumed, skipped = self.consumed_samples + record.samples, self.skipped_iterations + record.skipped
        return Position(record.iteration, consumed, skipped)


def mean_loss(sums: dict[str, float]) -> float:
    """Returns the mean loss per token, from sums over all workers."""
    return sums["loss_sum"] / max(sums["loss_tokens"], 1.0)
