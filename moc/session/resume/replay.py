"""Replays iterations, and implements MoEvement's sparse-to-dense conversion of a window (section 3.3).

    for each iteration of the window:                       # Figure 8
        load the state of operators that do not learn yet from the snapshot of this iteration
        activate operators that are now complete; the others stay frozen: they compute, and pass gradients on
        replay the next iteration                           # its step record determines how gradients were clipped

This module replays one iteration and tracks progress; :mod:`moc.session.resume.rebuilding` has the order.  Either all
workers replay together, or only the stages that lost state do.  The others then send them logged output by
:meth:`Replayer.serve` (section 3.4).

Every update is bit-identical to the original one:

* Randomness and samples follow from the position.
* Frozen operators have the weights that the iteration was computed with.
* Gradients of the other operators do not depend on whether these learn.
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

from moc.errors import code_of
from moc.fault_points import reach
from moc.files import decode
from moc.recovery.plan import InterruptedReplay
from moc.runtime.collectives import gather, run_on_all
from moc.runtime.device import synchronize_and_check
from moc.session.engine import Engine
from moc.state.interface import FreezingError, TrainingState
from moc.state.record import Position, StepRecord, mean_loss
from moc.store.errors import CheckpointError


class ReplayState(NamedTuple):
    """State between two replayed iterations; ``frozen`` operators lag behind, not yet fully loaded before it."""

    position: Position
    frozen: frozenset[str] = frozenset()


@dataclass
class ReplayProgress:
    """Progress of a worker's replay, kept if the loss of another stage interrupts it.

    Attributes:
        state: current state; None if the state is not valid.
        reduced: the worker also has the reduced gradients of the next iteration.
        unreported: replayed iterations not reported yet.
    """

    state: ReplayState | None = None
    reduced: bool = False
    unreported: list[_WorkerStep] = field(default_factory=list)

    def move_to(self, state: ReplayState | None) -> None:
        """Sets the state reached; None if it is not valid."""
        self.state, self.reduced = state, False

    @property
    def interrupted(self) -> InterruptedReplay | None:
        """Returns the part of the progress that other workers need."""
        return self.state and InterruptedReplay(self.state.position.iteration, self.state.frozen, self.reduced)


class ReplayedStep(NamedTuple):
    """Replayed iteration.

    Attributes:
        iteration: counted from 1.
        frozen: number of operators that did not learn.
        seconds: maximum duration over workers.
        workers: number of workers that replayed it, without lost ones.
        stages: that replayed it while others served it; empty if all stages replayed it together.
        loss: as replayed; None unless every worker of the last stage replayed it and survives.
        exact: loss and learning rate equal the recorded ones; None without a loss.
        difference: replayed and recorded values, if not exact.
    """

    iteration: int
    frozen: int
    seconds: float
    workers: int
    stages: tuple[int, ...]
    loss: float | None
    exact: bool | None
    difference: str = ""


class _WorkerStep(NamedTuple):
    """One worker's results of a replayed iteration."""

    stage: int
    stages: frozenset[int]
    frozen: int
    seconds: float
    rate: float
    record: StepRecord
    sums: dict[str, float]


@dataclass(frozen=True)
class Replayer:
    """Replay of iterations by their step records.

    Attributes:
        engine: engine of this worker.
        progress: progress of the replay; outlives the generation.
    """

    engine: Engine
    progress: ReplayProgress = field(default_factory=ReplayProgress)

    def complete(self, record: StepRecord) -> None:
        """Completes an iteration whose reduced gradients this worker has, but whose commit all-reduce it has missed."""
        self.engine.apply(record)

    def compute(self, position: Position, record: StepRecord, frozen: Collection[str], stages: Collection[int]) -> None:
        """Replays the iteration after a position.

        Operators in ``frozen`` do not learn.  ``stages`` replay it while others serve it; if empty, all stages replay
        it.
        """
        reach("replaying", record.iteration)
        start = time.perf_counter()
        with self.engine.tap.replaying(stages):
            completing = partial(self._completing, ReplayState(position.after(record), frozenset(frozen)))
            sums, rate = self.engine.replay(record, position, completing)
        seconds, stage = time.perf_counter() - start, self.engine.world.pipeline_rank
        worker_step = _WorkerStep(stage, frozenset(stages), len(frozen), seconds, rate, record, sums)
        self.progress.unreported.append(worker_step)

    @contextlib.contextmanager
    def _completing(self, next_state: ReplayState) -> Iterator[None]:
        """Context of the update.

        No worker starts the update before its entire stage has the reduced gradients.  If a loss interrupts the stage
        now, the workers that have not started can complete it, too.
        """
        synchronize_and_check(self.engine.world.device)
        self.progress.reduced = True
        wait_for_stage(self.engine)
        self.progress.move_to(None)
        yield
        self.progress.move_to(next_state)

    def serve(self, iteration: int, stages: Collection[int]) -> None:
        """Sends this worker's output of an iteration to the stages that replay it."""
        self.engine.tap.serve(iteration, stages)

    def unreported_steps(self) -> list[ReplayedStep]:
        """Returns the replayed iterations not reported yet; a collective call."""
        local, self.progress.unreported = self.progress.unreported, []
        by_iteration: dict[int, list[_WorkerStep]] = defaultdict(list)
        for worker_step in (worker_step for worker in gather(local) for worker_step in worker):
            by_iteration[worker_step.record.iteration].append(worker_step)
        return [self._sum_up(iteration, worker_steps) for iteration, worker_steps in sorted(by_iteration.items())]

    def _sum_up(self, iteration: int, worker_steps: Sequence[_WorkerStep]) -> ReplayedStep:
        world, (any_step, *_) = self.engine.world, worker_steps
        loss = exact = None
        difference = ""
        last_stage_workers = sum(step.stage == world.pipeline_size - 1 for step in worker_steps)
        if len(worker_steps) == world.size or last_stage_workers == world.size // world.pipeline_size:
            loss = mean_loss({name: math.fsum(step.sums[name] for step in worker_steps) for name in any_step.sums})
            exact = equals_record(loss, any_step.rate, any_step.record)
        if exact is False:
            recorded = f"it had {any_step.record.loss} and {any_step.record.learning_rate}"
            difference = f"loss {loss} and learning rate {any_step.rate}; {recorded}"
        stages = tuple(sorted(set().union(*(step.stages for step in worker_steps))))
        frozen, seconds = max(step.frozen for step in worker_steps), max(step.seconds for step in worker_steps)
        return ReplayedStep(iteration, frozen, seconds, len(worker_steps), stages, loss, exact, difference)


def wait_for_stage(engine: Engine) -> None:
    """Waits for all workers of this pipeline stage; a collective call of the stage."""
    gather(None, engine.peers)


@contextlib.contextmanager
def unfreeze_on_exit(state: TrainingState) -> Iterator[None]:
    """Activates all frozen operators on exit, also after an error."""
    try:
        yield
    finally:
        state.activate(state.frozen)


def check_freezing(state: TrainingState) -> None:
    """Refuses a model whose operators cannot be frozen one by one, before a recovery relies on it; a collective call.

    Raises:
        CheckpointError: on all workers, if one refuses.
    """
    run_on_all(lambda: _freeze_one_by_one(state), "cannot freeze operators")


def _freeze_one_by_one(state: TrainingState) -> None:
    try:
        with unfreeze_on_exit(state):
            for operator in state.operators():
                state.freeze([operator])
                state.activate([operator])
    except FreezingError as error:
        raise CheckpointError(f"sparse checkpoints cannot be replayed: {error}", code=code_of(error)) from None


def record_of(saved: Mapping[str, Any], where: str) -> StepRecord:
    """Returns the step record in the non-tensor state of the snapshot that ``where`` names.

    Raises:
        CheckpointError: the snapshot has no step record.
    """
    if not saved.get("record"):
        raise CheckpointError(
            f"{where} has no step record, so its iteration cannot be replayed. Fix: load another one (--ckpt-step)",
            code="step-record-missing",
        )
    return decode.convert(saved["record"], StepRecord)


def equals_record(loss: float, rate: float, record: StepRecord) -> bool:
    """Whether a replayed iteration equals its record in loss and learning rate."""
    same_loss = loss == record.loss or (math.isnan(loss) and math.isnan(record.loss))
    return same_loss and rate == record.learning_rate
