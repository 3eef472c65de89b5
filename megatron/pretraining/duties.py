"""Decides which actions are due after an iteration, identically on all workers, from the flags and the run's past."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config import Config


@dataclass(frozen=True)
class Duties:
    """Actions that are due after a completed iteration.

    Attributes:
        evaluates: compute the validation loss.
        saves: save a dense checkpoint.
        ends: the job ends at a limit.
        stops: a worker received a stop request: all save and end, without an evaluation.
    """

    evaluates: bool = False
    saves: bool = False
    ends: bool = False
    stops: bool = False


@dataclass(frozen=True)
class Done:
    """Past of the run when a generation begins.

    Attributes:
        evaluated: last iteration whose validation loss was reported; 0 if there is none.
        saved: last iteration in ``--save``; 0 if there is none.
        by_run: this run completed the last iteration, not the run that left the dense checkpoint of ``--load``.
        by_job: this launch completed it; a limit that ended an earlier launch does not end this one.
        by_workers: workers that completed it still run.  After a stop, a launch may start others, on more nodes.
    """

    evaluated: int = 0
    saved: int = 0
    by_run: bool = False
    by_job: bool = False
    by_workers: bool = False


def due(interval: int | None, iteration: int) -> bool:
    """Returns whether an action with a period of ``interval`` iterations is due after an iteration."""
    return bool(interval) and iteration > 0 and iteration % interval == 0


def duties_after(config: Config, iteration: int, stops: bool) -> Duties:
    """Returns the duties after an iteration; ``stops`` if the workers have agreed to stop after it."""
    return Duties(
        evaluates=due(config.validation.eval_interval, iteration),
        saves=due(config.checkpoint.save_interval, iteration),
        ends=due(config.training.exit_interval, iteration),
        stops=stops,
    )


def missed(config: Config, iteration: int, stops: bool, done: Done) -> Duties:
    """Returns the duties of the last completed iteration or an earlier one that were not carried out.

    A loss of workers interrupts the actions after an iteration, and abandons pending saves.
    """
    after, interval = duties_after(config, iteration, stops), config.checkpoint.save_interval
    return Duties(
        evaluates=done.by_run and after.evaluates and done.evaluated < iteration,
        saves=done.by_run and bool(interval) and done.saved // interval < iteration // interval,
        ends=done.by_job and after.ends,
        stops=done.by_workers and after.stops,
    )
