"""On how many workers a run has trained, and for how long; pure functions of its events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moc.report.clock import Event, of_kind


@dataclass(frozen=True)
class Period:
    """Iterations that the same number of workers has computed, from a ``start`` to the last of them.

    Attributes:
        workers: how many.
        began_s: seconds since the run began; training then began, or continued.
        ended_s: when the last iteration was complete.
        iterations: completed in it, repeated ones included.
    """

    workers: int
    began_s: float
    ended_s: float
    iterations: int


@dataclass(frozen=True)
class Moves:
    """What went from worker to worker since nodes were lost or came, with ``--elastic``.

    Attributes:
        count: changes of members after which experts moved.
        bytes: in all.
        seconds: of one, on average.
        fallbacks: losses after which a checkpoint was read, since an expert was on no node any more.
    """

    count: int
    bytes: int
    seconds: float
    fallbacks: int


def periods(events: Sequence[Event], began: float) -> tuple[Period, ...]:
    """The periods of a run in order; those without an iteration are left out.

    Args:
        events: of the run, in file order.
        began: when it began, in Unix seconds.
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
    """By number of workers, the seconds that so many have trained, most workers first."""
    found: dict[int, float] = defaultdict(float)
    for period in of:
        found[period.workers] += period.ended_s - period.began_s
    return dict(sorted(found.items(), reverse=True))


def moves(events: Sequence[Event]) -> Moves | None:
    """What has moved since members changed; None if nothing has, and no checkpoint was read for it."""
    migrations, fallbacks = of_kind("migration", events), of_kind("fallback", events)
    if not migrations and not fallbacks:
        return None
    seconds = [event["elapsed_s"] for event in migrations]
    amount = sum(event["bytes"] for event in migrations)
    return Moves(len(migrations), amount, sum(seconds) / len(seconds) if seconds else 0.0, len(fallbacks))
