"""What is due after an iteration: a decision by the flags and the run's past, identical on all workers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config import Config


@dataclass(frozen=True)
class Duties:
    """What is due after a completed iteration.

    Attributes:
        evaluates: the validation loss.
        saves: a dense checkpoint.
        ends: the job ends at a limit.
        stops: a worker was asked to stop: all save and end, without an evaluation.
    """

    evaluates: bool = False
    saves: bool = False
    ends: bool = False
    stops: bool = False


@dataclass(frozen=True)
class Done:
    """What is known of the past when a generation begins.

    Attributes:
        evaluated: the last iteration whose validation loss was reported; 0 if there is none.
        saved: the last iteration that ``--save`` has; 0 if there is none.
        by_run: this run completed the last iteration, and not the one that left the dense checkpoint of ``--load``.
        by_job: this launch completed it; a limit that ended an earlier launch does not end this one.
        by_workers: workers that completed it are still there.  A launch may start others after a stop, on more nodes.
    """

    evaluated: int = 0
    saved: int = 0
    by_run: bool = False
    by_job: bool = False
    by_workers: bool = False


def due(interval: int | None, iteration: int) -> bool:
    """Whether an action with a period of ``interval`` iterations is due after an iteration."""
    return bool(interval) and iteration > 0 and iteration % interval == 0


def duties_after(config: Config, iteration: int, stops: bool) -> Duties:
    """What is due after an iteration; ``stops`` if the workers have agreed to stop after it."""
    return Duties(
        evaluates=due(config.validation.eval_interval, iteration),
        saves=due(config.checkpoint.save_interval, iteration),
        ends=due(config.training.exit_interval, iteration),
        stops=stops,
    )


def missed(config: Config, iteration: int, stops: bool, done: Done) -> Duties:
    """What was due after the last completed iteration, or before it, and has not happened.

    A loss of workers interrupts what follows an iteration, and abandons saves under way.
    """
    after, interval = duties_after(config, iteration, stops), config.checkpoint.save_interval
    return Duties(
        evaluates=done.by_run and after.evaluates and done.evaluated < iteration,
        saves=done.by_run and bool(interval) and done.saved // interval < iteration // interval,
        ends=done.by_job and after.ends,
        stops=done.by_workers and after.stops,
    )
