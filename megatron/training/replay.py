"""From the snapshots of a window to the state at its end: MoEvement's sparse-to-dense conversion (section 3.3).

    for each moment of the window:                          # Figure 8
        load what its snapshot holds of operators that do not learn yet
        operators that are whole now learn; the others are frozen: they compute, and let gradients through
        compute the next iteration again                    # the step record of that iteration says how it was clipped

All workers do it together.  Randomness and samples follow from the position, the weights of frozen operators are those
that the iteration was computed with, and gradients of the others do not depend on whether these learn.  So every
update is the one that was, to the last bit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron.training.agreement import agreed
from megatron.training.checkpoint_contents import Position
from megatron.training.data import BatchStream
from megatron.training.step import Stepper, StepRecord
from moc.recovery.sources import Moment
from moc.state.freezing import FreezingError
from moc.state.training_state import TrainingState
from moc.store.errors import CheckpointError

Repeat = Callable[[Position, StepRecord], float]
"""Computes the iteration that comes after a position again, and tells its loss."""


class Repetition:
    """Computes iterations again that are known by their records; for all workers together.

    Args:
        stepper: of this worker; its rider is not asked.
        stream: this worker's samples; None on stages that read none.
    """

    def __init__(self, stepper: Stepper, stream: BatchStream | None):
        self._stepper, self._stream = stepper, stream

    def __call__(self, position: Position, record: StepRecord) -> float:
        """The loss; see :meth:`Stepper.repeat`."""
        samples = None if self._stream is None else self._stream.iteration(position.consumed_samples)
        return self._stepper.repeat(record, samples)


def convert(
    moments: Sequence[Moment],
    load: Callable[[Moment], bool],
    state: TrainingState,
    compute_again: Callable[[Moment], None],
) -> bool:
    """Brings the state to the end of a window.

    Args:
        moments: of the window.
        load: fills the state with what is new at a moment; False, on all workers alike, where that is not possible.
        state: of this worker.
        compute_again: computes the iteration after a moment again.

    Returns:
        Whether the state is there; nothing is frozen then, nor otherwise.
    """
    with _nothing_frozen_after(state):
        for moment in moments:
            if not load(moment):
                return False
            state.freeze(moment.frozen)
            state.activate(moment.full)
            if moment is not moments[-1]:
                compute_again(moment)
    return True


@contextlib.contextmanager
def _nothing_frozen_after(state: TrainingState) -> Iterator[None]:
    try:
        yield
    finally:
        state.activate(state.frozen)


def check_freezing(state: TrainingState) -> None:
    """Refuses a model of which operators cannot be frozen one by one, before anybody relies on it; a collective call.

    Raises:
        CheckpointError: on all workers, if it is so on one.
    """
    agreed(lambda: _freeze_one_by_one(state), "cannot freeze operators")


def _freeze_one_by_one(state: TrainingState) -> None:
    try:
        with _nothing_frozen_after(state):
            for operator in state.operators():
                state.freeze([operator])
                state.activate([operator])
    except FreezingError as error:
        raise CheckpointError(f"sparse checkpoints cannot be replayed: {error}") from None


def record_of(saved: Mapping[str, Any], where: str) -> StepRecord:
    """The step record that is stored with a snapshot.

    Args:
        saved: what of the snapshot is not a tensor.
        where: the snapshot, for the message.

    Raises:
        CheckpointError: there is none.
    """
    try:
        return StepRecord(**saved["record"])
    except (KeyError, TypeError):
        raise CheckpointError(
            f"{where} does not tell how its iteration was clipped, so it cannot be computed again"
        ) from None


def is_repeated(loss: float, rate: float, record: StepRecord) -> bool:
    """Whether an iteration that was computed again is the one of the record, as far as loss and learning rate tell."""
    same_loss = loss == record.loss or (math.isnan(loss) and math.isnan(record.loss))
    return same_loss and rate == record.learning_rate
