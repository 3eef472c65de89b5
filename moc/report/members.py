"""Summarizes the number of workers of a run over time, from its events; pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moc.report.clock import Event, of_kind


@dataclass(frozen=True)
class Period:
    """Iterations that the same number of workers computed, from a ``start`` to the last of them.

    Attributes:
        workers: number of workers.
        began_s: seconds from the start of the run until training began or continued.
        ended_s: seconds from the start of the run until the last iteration was complete.
        iterations: iterations completed in it, repeated ones included.
    """

    workers: int
    began_s: float
    ended_s: float
    iterations: int


@dataclass(frozen=True)
class Moves:
    """Moves of experts between workers after membership changes, with ``--elastic``.

    Attributes:
        count: membership changes that moved experts.
        bytes: total bytes moved.
        seconds: mean seconds of a change.
        fallbacks: losses after which a checkpoint was read, because no node had some expert.
    """

    count: int
    bytes: int
    seconds: float
    fallbacks: int


def periods(events: Sequence[Event], began: float) -> tuple[Period, ...]:
    """Returns the periods of a run in order, without periods that have no iteration.

    Args:
        events: events of the run, in file order.
        began: start of the run, in Unix seconds.
    """
    found: list[Period] = []
    workers, start, times = 1, began, list[float]()
    for event in (*events, None):
        kind = "start" if event is None else event["type"]
        if kind == "start":
            if times:
                found.append(Period(workers, start - began, times[-1] - began, len(times)))
            times = []
        if event is not None and kind == "start":
            workers, start = event.get("world_size", 1), event["time"]
        elif event is not None and kind == "iteration":
            times.append(event["time"])
    return tuple(found)


def seconds_by_workers(of: Sequence[Period]) -> Mapping[int, float]:
    """Returns the seconds of training by number of workers, most workers first."""
    found: dict[int, float] = defaultdict(float)
    for period in of:
        found[period.workers] += period.ended_s - period.began_s
    return dict(sorted(found.items(), reverse=True))


def moves(events: Sequence[Event]) -> Moves | None:
    """Returns the moves of experts; None without moves and fallbacks."""
    migrations, fallbacks = of_kind("migration", events), of_kind("fallback", events)
    if not migrations and not fallbacks:
        return None
    seconds = [event["elapsed_s"] for event in migrations]
    amount = sum(event["bytes"] for event in migrations)
    return Moves(len(migrations), amount, sum(seconds) / len(seconds) if seconds else 0.0, len(fallbacks))
