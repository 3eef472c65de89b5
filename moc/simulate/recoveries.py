"""Extracts the recoveries of a run and their parts from its ``events.jsonl``; pure functions."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, linear_regression
from typing import NamedTuple

from moc.simulate.program_recovery import RecoveryCosts

TOGETHER_S = 0.25
"""Seconds within which kills are one fault; the next fault waits until workers train again, or recover."""

_LIVE = "live"  # tier of a resume from live workers without a loss, after a change of policy

Event = Mapping
"""Event of ``events.jsonl``, in order of time."""


class ByIteration[T](dict[int, T]):
    """Values by iteration; a resumed run removes the last ones."""

    def __init__(self, values: Iterable[tuple[int, T]] = ()):
        super().__init__()
        self._numbers: list[int] = []  # ascending
        for iteration, value in values:
            self[iteration] = value

    def __setitem__(self, iteration: int, value: T) -> None:
        if iteration not in self:
            insort(self._numbers, iteration)
        super().__setitem__(iteration, value)

    def undo(self, after: int) -> list[T]:
        """Removes and returns the values of later iterations, in order."""
        first = bisect_right(self._numbers, after)
        gone = self._numbers[first:]
        del self._numbers[first:]
        return [self.pop(iteration) for iteration in gone if iteration in self]


def stretches(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Yields the events of each recovery: from a loss to the first iteration after the last ``start`` that followed it.

    A loss during a recovery belongs to it.  A recovery that is unfinished when the job or the events end is left out.
    A job restarted without an ``exit`` also counts as a loss.  It shows only when the state is restored (``resume``),
    or when training starts without one.
    """
    under_way, started = None, False
    running = live = False  # since the last start: has the run not exited; was state taken over from live workers
    for event in events:
        kind = event["type"]
        live |= kind == "resume" and event.get("tier") == _LIVE
        if kind == "generation" or is_kill(event) or (running and not live and kind in ("resume", "start")):
            under_way, started = under_way or [], False
        if under_way is not None:
            under_way.append(event)
            started |= kind == "start"
            if kind == "iteration" and started:
                yield under_way
                under_way = None
        if kind in ("start", "iteration"):
            running, live = True, False
        elif kind == "exit":
            running, under_way = False, None


def faults(events: Iterable[Event]) -> list[tuple[float, int]]:
    """Returns the times of kills, in Unix seconds, and the number of workers killed together."""
    found: list[tuple[float, int]] = []
    for event in filter(is_kill, events):
        if found and event["time"] - found[-1][0] < TOGETHER_S:
            found[-1] = found[-1][0], found[-1][1] + 1
        else:
            found.append((event["time"], 1))
    return found


class Recovered(NamedTuple):
    """Recovery from its last loss on, with the number of workers lost together."""

    lost: int
    parts: RecoveryCosts


def recovered(stretch: Sequence[Event], usual_s: float) -> Recovered | None:
    """Returns the recovery of a stretch (:func:`stretches`), where an iteration usually takes ``usual_s``.

    None if the time of the loss is unknown, or there was no state to resume from.
    """
    resume = next((event for event in reversed(stretch) if event["type"] == "resume"), None)
    lived = [event for event in stretch if event["type"] == "generation" and event["noticed_s"] > 0]
    heard = [(event["time"] - event["met_s"] - event["noticed_s"], 1) for event in lived]
    at, lost = max(faults(stretch) or heard, default=(None, 0))
    if resume is None or at is None:
        return None
    begun = resume["time"] - resume["seconds"]
    again = [e for e in stretch if e["type"] == "replay" and begun <= e["time"] <= resume["time"]]
    # the replacement of a lost rank 0 did not witness the loss, so the time when the others stopped is unknown
    stopped = next((moment for moment in (e["time"] - e["met_s"] for e in lived) if moment >= at), at)
    parts = RecoveryCosts(
        detect_s=stopped - at,
        regroup_s=max(0.0, begun - stopped),
        transfer_s=max(0.0, resume["seconds"] - sum(e["seconds"] for e in again)),
        warm_up_s=max(0.0, stretch[-1]["time"] - resume["time"] - usual_s),
        frozen_s=_mean(e["seconds"] for e in again if e["frozen"]),
        alone_s=_mean(e["seconds"] for e in again if not e["frozen"]),
    )
    return Recovered(lost, parts)


def fitted(recoveries: Sequence[Recovered]) -> RecoveryCosts:
    """Returns the mean of one or more recoveries, as a line over the number of workers lost together."""
    parts = [one.parts for one in recoveries]
    restarts = [one.restart_s for one in parts]
    detect_s = _mean(one.detect_s for one in parts if one.detect_s) or 0.0
    transfer_s, warm_up_s = fmean(one.transfer_s for one in parts), fmean(one.warm_up_s for one in parts)
    regroup_s = max(0.0, fmean(restarts) - detect_s - transfer_s - warm_up_s)
    further = fmean(one.lost for one in recoveries) - 1
    lost = [one.lost for one in recoveries]
    slope = linear_regression(lost, restarts).slope if len(set(lost)) > 1 else 0.0
    more_s = min(max(0.0, slope), regroup_s / further) if further else 0.0
    return RecoveryCosts(
        detect_s,
        regroup_s - further * more_s,
        transfer_s,
        warm_up_s,
        frozen_s=_mean(one.frozen_s for one in parts if one.frozen_s is not None),
        alone_s=_mean(one.alone_s for one in parts if one.alone_s is not None),
        more_s=more_s,
    )


def is_kill(event: Event) -> bool:
    """Returns whether an event is an injected fault that kills a worker."""
    return event["type"] == "inject" and event["action"] == "kill"


def _mean(seconds: Iterable[float]) -> float | None:
    """Returns the mean; None for an empty sequence."""
    seconds = list(seconds)
    return fmean(seconds) if seconds else None
