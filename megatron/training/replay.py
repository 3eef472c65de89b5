"""Iterations that are computed again, and MoEvement's sparse-to-dense conversion of a window (section 3.3).

    for each moment of the window:                          # Figure 8
        load what its snapshot holds of operators that do not learn yet
        operators that are whole now learn; the others are frozen: they compute, and let gradients through
        compute the next iteration again                    # the step record of that iteration says how it was clipped

All workers do it together, or the stages that have lost something alone: the others :meth:`Replay.serve` what they had
sent them (section 3.4).  Randomness and samples follow from the position, the weights of frozen operators are those
that the iteration was computed with, and gradients of the others do not depend on whether these learn.  So every
update is the one that was, to the last bit.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.training.agreement import agreed, gather
from megatron.training.checkpoint_contents import Position
from megatron.training.data import BatchStream
from megatron.training.step import Stepper, StepRecord, mean_loss
from moc.recovery.sources import Moment
from moc.state.freezing import FreezingError
from moc.state.training_state import TrainingState
from moc.store.errors import CheckpointError


@dataclass(frozen=True)
class Repetition:
    """What computes iterations again that are known by their records.

    Attributes:
        stepper: of this worker; its rider is not asked.
        stream: this worker's samples; None on stages that read none.
    """

    stepper: Stepper
    stream: BatchStream | None

    @contextlib.contextmanager
    def by(self, stages: Collection[int]) -> Iterator[Replay]:
        """While some stages compute again; none for all."""
        replay = Replay(self, stages)
        with self.stepper.boundaries.replaying(stages if replay.takes_part else ()):
            yield replay

    def complete(self, record: StepRecord) -> None:
        """Completes an iteration of which this worker has the reduced gradients, but not seen the vote."""
        self.stepper.optimizer.take_gradients()
        self.stepper.complete(record)


class Repeated(NamedTuple):
    """An iteration that was computed again.

    Attributes:
        iteration: which, counted from 1.
        frozen: operators that did not learn.
        seconds: that it took; of all workers the most.
        workers: that computed it.
        loss: as it was computed; None if the last stage, which has it, did not compute.
        exact: loss and learning rate are those of the record; None if there is no loss.
        is_not: what they are and what they were, if not exact.
    """

    iteration: int
    frozen: int
    seconds: float
    workers: int
    loss: float | None
    exact: bool | None
    is_not: str = ""


class _Part(NamedTuple):
    """What one worker knows of an iteration that it has computed again."""

    frozen: int
    seconds: float
    rate: float
    record: StepRecord
    sums: dict[str, float]


class Replay:
    """Iterations that are computed again one after the other, for all workers alike; see :class:`Repetition`."""

    def __init__(self, repetition: Repetition, stages: Collection[int]):
        self._stepper, self._stream, self._stages = repetition.stepper, repetition.stream, stages
        self._parts: dict[int, _Part] = {}
        world = self._stepper.world
        self._has_loss = not stages or world.pipeline_size - 1 in stages
        self.takes_part = not stages or world.pipeline_rank in stages
        """Whether this worker computes; if not, it serves."""

    def compute(self, position: Position, record: StepRecord, frozen: int = 0) -> None:
        """Computes the iteration after a position again.

        Args:
            position: of this worker's state.
            record: of the iteration.
            frozen: operators that do not learn.
        """
        begun, rate = time.perf_counter(), self._stepper.optimizer.learning_rate
        samples = None if self._stream is None else self._stream.iteration(position.consumed_samples)
        sums = {name: float(value) for name, value in self._stepper.repeat(record, samples).items()}
        self._parts[record.iteration] = _Part(frozen, time.perf_counter() - begun, rate, record, sums)

    def serve(self, iteration: int) -> None:
        """Gives those who compute an iteration again what this worker sent them then."""
        self._stepper.boundaries.serve(iteration, self._stages)

    def repeated(self) -> list[Repeated]:
        """What was computed again; a collective call."""
        parts: dict[int, list[_Part]] = defaultdict(list)
        for worker in gather(self._parts):
            for iteration, part in worker.items():
                parts[iteration].append(part)
        return [self._sum_up(iteration, of_workers) for iteration, of_workers in sorted(parts.items())]

    def _sum_up(self, iteration: int, parts: Sequence[_Part]) -> Repeated:
        frozen, _, rate, record, _ = parts[0]
        loss = mean_loss({name: math.fsum(part.sums[name] for part in parts) for name in parts[0].sums})
        exact = is_repeated(loss, rate, record) if self._has_loss else None
        is_not = f"loss {loss} and learning rate {rate}; it had {record.loss} and {record.learning_rate}"
        seconds = max(part.seconds for part in parts)
        return Repeated(
            iteration,
            frozen,
            seconds,
            len(parts),
            loss if self._has_loss else None,
            exact,
            "" if exact is not False else is_not,
        )


def convert(
    moments: Sequence[Moment],
    load: Callable[[Moment], bool],
    state: TrainingState,
    compute_again: Callable[[Moment], None],
    learns: bool = True,
) -> bool:
    """Brings the state to the end of a window.

    Args:
        moments: of the window.
        load: fills the state with what is new at a moment; False, on all workers alike, where that is not possible.
        state: of this worker.
        compute_again: computes the iteration after a moment again, or helps those that do.
        learns: whether the state is to change; not where this worker keeps what it has.

    Returns:
        Whether the state is there; nothing is frozen then, nor otherwise.
    """
    with _nothing_frozen_after(state):
        for moment in moments:
            if not load(moment):
                return False
            if learns:
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
