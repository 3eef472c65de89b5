"""Iterations that are computed again, and MoEvement's sparse-to-dense conversion of a window (section 3.3).

    for each moment of the window:                          # Figure 8
        load what its snapshot holds of operators that do not learn yet
        operators that are whole now learn; the others are frozen: they compute, and let gradients through
        compute the next iteration again                    # the step record of that iteration says how it was clipped

Here is how an iteration is computed again, and who knows that it was; the order has
:mod:`moc.session.resume.rebuilding`.  All workers do it together, or the stages that have lost
something alone: the others :meth:`Replayer.serve` what they had sent them (section 3.4).  Randomness and samples
follow from the position, the weights of frozen operators are those that the iteration was computed with, and gradients
of the others do not depend on whether these learn.  So every update is the one that was, to the last bit.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moc.faults import reach
from moc.recovery.scope import Replayed
from moc.runtime.agreement import gather, run_on_all
from moc.runtime.groups import settled
from moc.session.engine import Engine
from moc.state.interface import FreezingError, TrainingState
from moc.state.record import Position, StepRecord, mean_loss
from moc.store.errors import CheckpointError


class Reached(NamedTuple):
    """A state between two iterations that are computed again.

    Attributes:
        position: how far it is.
        frozen: operators that are not at this position, since they had not been loaded in full before it.
    """

    position: Position
    frozen: frozenset[str] = frozenset()


@dataclass
class ReplayProgress:
    """How far a worker has come with computing again: another stage may be lost meanwhile, and then it goes on there.

    Attributes:
        at: the state that it has; None if it has none that is whole.
        reduced: it has the reduced gradients of the iteration after it, too.
        parts: what it has computed and not told yet.
    """

    at: Reached | None = None
    reduced: bool = False
    parts: list[_Part] = field(default_factory=list)

    def move_to(self, at: Reached | None) -> None:
        """The state is another one, or none."""
        self.at, self.reduced = at, False

    @property
    def told(self) -> Replayed | None:
        """What others need to know of it."""
        return self.at and Replayed(self.at.position.iteration, self.at.frozen, self.reduced)


class ReplayedStep(NamedTuple):
    """An iteration that was computed again.

    Attributes:
        iteration: which, counted from 1.
        frozen: operators that did not learn.
        seconds: that it took; of all workers the most.
        workers: that computed it, as far as they are left.
        stages: that computed it while others served it; none where all computed it together.
        loss: as it was computed; None if the last stage, which has it, did not compute, or not all of it is left.
        exact: loss and learning rate are those of the record; None if there is no loss.
        is_not: what they are and what they were, if not exact.
    """

    iteration: int
    frozen: int
    seconds: float
    workers: int
    stages: tuple[int, ...]
    loss: float | None
    exact: bool | None
    is_not: str = ""


class _Part(NamedTuple):
    """What one worker knows of an iteration that it has computed again."""

    stage: int
    stages: frozenset[int]
    frozen: int
    seconds: float
    rate: float
    record: StepRecord
    sums: dict[str, float]


@dataclass(frozen=True)
class Replayer:
    """Computes iterations again that are known by their records.

    Attributes:
        engine: of this worker.
        progress: how far it has come, which outlives the generation.
    """

    engine: Engine
    progress: ReplayProgress = field(default_factory=ReplayProgress)

    def complete(self, record: StepRecord) -> None:
        """Completes an iteration of which this worker has the reduced gradients, but not seen the vote."""
        self.engine.apply(record)

    def compute(self, position: Position, record: StepRecord, frozen: Collection[str], stages: Collection[int]) -> None:
        """Computes the iteration after a position again.

        Args:
            position: of this worker's state.
            record: of the iteration.
            frozen: operators that do not learn.
            stages: that compute it, while others serve it; none where all compute it.
        """
        reach("replaying", record.iteration)
        begun = time.perf_counter()
        with self.engine.tap.replaying(stages):
            completing = partial(self._completing, Reached(position.after(record), frozenset(frozen)))
            sums, rate = self.engine.replay(record, position, completing)
        seconds, stage = time.perf_counter() - begun, self.engine.world.pipeline_rank
        part = _Part(stage, frozenset(stages), len(frozen), seconds, rate, record, sums)
        self.progress.parts.append(part)

    @contextlib.contextmanager
    def _completing(self, then: Reached) -> Iterator[None]:
        """While an iteration is completed.

        Nobody begins with it before all of its stage have the reduced gradients: should they be called away now, those
        that have not begun can complete it, too.
        """
        settled(self.engine.world.device)
        self.progress.reduced = True
        wait_for_stage(self.engine)
        self.progress.move_to(None)
        yield
        self.progress.move_to(then)

    def serve(self, iteration: int, stages: Collection[int]) -> None:
        """Gives stages that compute an iteration again what this worker sent them then."""
        self.engine.tap.serve(iteration, stages)

    def repeated(self) -> list[ReplayedStep]:
        """What was computed again and not told yet; a collective call."""
        mine, self.progress.parts = self.progress.parts, []
        parts: dict[int, list[_Part]] = defaultdict(list)
        for part in (part for worker in gather(mine) for part in worker):
            parts[part.record.iteration].append(part)
        return [self._sum_up(iteration, of_workers) for iteration, of_workers in sorted(parts.items())]

    def _sum_up(self, iteration: int, parts: Sequence[_Part]) -> ReplayedStep:
        world, (first, *_) = self.engine.world, parts
        loss = exact = None
        is_not = ""
        last = sum(part.stage == world.pipeline_size - 1 for part in parts)
        if last == world.size // world.pipeline_size:
            loss = mean_loss({name: math.fsum(part.sums[name] for part in parts) for name in first.sums})
            exact = is_repeated(loss, first.rate, first.record)
        if exact is False:
            had = f"it had {first.record.loss} and {first.record.learning_rate}"
            is_not = f"loss {loss} and learning rate {first.rate}; {had}"
        stages = tuple(sorted(set().union(*(part.stages for part in parts))))
        frozen, seconds = max(part.frozen for part in parts), max(part.seconds for part in parts)
        return ReplayedStep(iteration, frozen, seconds, len(parts), stages, loss, exact, is_not)


def wait_for_stage(engine: Engine) -> None:
    """Returns when all workers of this pipeline stage have come here; a collective call of them."""
    dist.all_reduce(torch.zeros((), device=engine.world.device), group=engine.peers)


@contextlib.contextmanager
def nothing_frozen_after(state: TrainingState) -> Iterator[None]:
    """Lets everything learn that is frozen in the end, however that comes."""
    try:
        yield
    finally:
        state.activate(state.frozen)


def check_freezing(state: TrainingState) -> None:
    """Refuses a model of which operators cannot be frozen one by one, before anybody relies on it; a collective call.

    Raises:
        CheckpointError: on all workers, if it is so on one.
    """
    run_on_all(lambda: _freeze_one_by_one(state), "cannot freeze operators")


def _freeze_one_by_one(state: TrainingState) -> None:
    try:
        with nothing_frozen_after(state):
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
