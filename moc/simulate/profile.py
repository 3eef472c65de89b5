"""Reads measurements of a run from its ``events.jsonl``: times and bandwidths, and the parts of each recovery.

They replace a cluster's data-sheet figures, and the recovery times of papers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression, median
from typing import NamedTuple

from moc.errors import code_of
from moc.files.event_log import events_file, read_events
from moc.simulate import SimulationError
from moc.simulate.policy_costs import RecoveryCosts

_SMALL_SHARE = 0.05  # share of iterations: the newest ones are undisturbed until the events of their snapshots arrive
_WARM_UP = 5  # iterations that allocate memory and connect


@dataclass(frozen=True)
class Profile:
    """Measurements of one run: medians, unless noted.

    Attributes:
        iteration_s: seconds of an iteration without a snapshot; if all had one, less their stalls.
        world: workers.
        host_bandwidth: bytes per second from one worker to host memory; None without snapshots.
        storage_bandwidth: bytes per second of all workers to storage; None if nothing was written.
        snapshot_bytes: of one snapshot, over all workers; None without snapshots.
        mean_iteration_s: mean seconds of an iteration outside recoveries, including saving.
        usable_s: from the end of an iteration until its snapshot is usable: copied, hashed and, with the disk tier,
            written; 0 without snapshots.
        recoveries: the parts of each recovery.
    """

    iteration_s: float
    world: int
    host_bandwidth: float | None = None
    storage_bandwidth: float | None = None
    snapshot_bytes: float | None = None
    mean_iteration_s: float = 0.0
    usable_s: float = 0.0
    recoveries: tuple[Recovered, ...] = ()


def read_profile(path: str | Path) -> Profile:
    """Reads ``events.jsonl``, given the file or its directory.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no event log, or has too few iterations.
    """
    events = read_events(path)
    try:
        return profile_of(events)
    except ValueError as error:
        raise SimulationError(f"{events_file(path)}: {error}", code=code_of(error)) from None


def profile_of(events: Iterable[Mapping]) -> Profile:
    """Returns the profile of the events of a run, or of a part of it.

    Raises:
        ValueError: there are too few iterations.
    """
    events = list(events)
    finder, times, lost = RecoveryFinder(), IterationTimes(), []
    for event in events:
        decided, is_recovery = finder.add(event)
        lost += [decided] if is_recovery else []
        times.add(decided, is_recovery)
    times.add(finder.pending)
    world, copies, finalizations, writes, written_s, sizes = 1, [], [], [], [], []
    for event in events:
        kind = event.get("type")
        if kind == "start":
            world = event.get("world_size", world)
        elif kind == "snapshot" and event.get("copy_s"):
            copies.append(event["bytes"] / world / event["copy_s"])
            finalizations.append(event["copy_s"] + event.get("hash_s", 0.0))
            sizes.append(event["bytes"])
        elif kind == "persist" and event.get("write_s"):
            writes.append(event["bytes"] / event["write_s"])
            written_s.append(event["write_s"])
    if times.median_s is None or times.mean_s is None:
        raise SimulationError(
            f"there are no iterations after the first {_WARM_UP}. Fix: profile a longer run",
            code="run-too-short",
        )
    in_storage = {event.get("tier") for event in events if event.get("type") == "snapshot"} == {"disk"}
    return Profile(
        iteration_s=times.median_s,
        world=world,
        host_bandwidth=_median(copies),
        storage_bandwidth=_median(writes),
        snapshot_bytes=_median(sizes),
        mean_iteration_s=times.mean_s,
        usable_s=(_median(finalizations) or 0.0) + (in_storage and _median(written_s) or 0.0),
        recoveries=tuple(filter(None, (recovered(stretch, times.mean_s) for stretch in lost))),
    )


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


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

    @property
    def last(self) -> int | None:
        """The largest iteration; None without values."""
        return self._numbers[-1] if self._numbers else None

    def newest(self, count: int) -> list[tuple[int, T]]:
        """Returns the values of the ``count`` largest iterations, in order."""
        return [(number, self[number]) for number in self._numbers[-count:]]

    def undo(self, after: int) -> list[T]:
        """Removes and returns the values of later iterations, in order."""
        first = bisect_right(self._numbers, after)
        undone = self._numbers[first:]
        del self._numbers[first:]
        return [self.pop(iteration) for iteration in undone if iteration in self]


class RecoveryFinder:
    """Finds recoveries in events that arrive one by one.

    A recovery lasts from a loss to the first iteration after the last ``start`` that followed it.  A loss during a
    recovery belongs to it.  A recovery that is unfinished when the job ends is none.  A job restarted without an
    ``exit`` also counts as a loss.  It shows only when the state is restored (``resume``), or when training starts
    without one.

    Attributes:
        pending: events of the recovery that is not finished yet; empty without one.
    """

    def __init__(self):
        self.pending: list[Event] = []
        self._started = False
        self._running = self._live = False  # since the last start: has the run not exited; was state taken over live

    def add(self, event: Event) -> tuple[list[Event], bool]:
        """Adds the next event; returns the events that are decided now, and whether they are a finished recovery."""
        kind = event["type"]
        self._live |= kind == "resume" and event.get("tier") == _LIVE
        is_restart = self._running and not self._live and kind in ("resume", "start")
        is_loss = kind == "generation" or is_kill(event) or is_restart
        if is_loss:
            self._started = False
        if not self.pending and not is_loss:
            decided, is_finished = [event], False
        else:
            self.pending.append(event)
            self._started |= kind == "start"
            is_finished = kind == "iteration" and self._started
            decided = self.pending if is_finished or kind == "exit" else []
        if decided:
            self.pending = []
        if kind in ("start", "iteration"):
            self._running, self._live = True, False
        elif kind == "exit":
            self._running = False
        return decided, is_finished


def stretches(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Yields the events of each finished recovery (:class:`RecoveryFinder`)."""
    finder = RecoveryFinder()
    for event in events:
        decided, is_recovery = finder.add(event)
        if is_recovery:
            yield decided


class IterationTimes:
    """Durations of iterations outside recoveries, from events that arrive one by one.

    The first iterations do not count, since they allocate memory and connect.
    """

    def __init__(self):
        self._times_by_number: dict[int, list[tuple[float, float]]] = {}  # seconds, and seconds of stalls in them
        self._disturbed: set[int] = set()
        self._first: int | None = None  # the smallest number
        self._stalled_s = 0.0
        self._undisturbed, self._without_stalls, self._all = list[float](), list[float](), list[float]()  # ascending

    @property
    def median_s(self) -> float | None:
        """Median seconds of undisturbed iterations; if few were undisturbed, of all, less their stalls."""
        has_few = len(self._undisturbed) < _SMALL_SHARE * len(self._all)
        times = self._without_stalls if has_few else self._undisturbed
        middle = len(times) // 2
        return (times[middle] + times[-middle - 1]) / 2 if times else None

    @property
    def mean_s(self) -> float | None:
        """Mean seconds of all iterations; None without any."""
        return fmean(self._all) if self._all else None

    def add(self, events: Iterable[Event], is_recovery: bool = False) -> None:
        """Adds the next events; iterations of a recovery do not count."""
        for event in events:
            kind, iteration = event.get("type"), event.get("iteration")
            if kind == "iteration":
                if event.get("elapsed_s") and not is_recovery:
                    self._add(event["iteration"], event["elapsed_s"])
                self._stalled_s = 0.0
            elif kind == "stall":
                self._disturb(iteration)
                self._stalled_s += event["seconds"]
            elif kind == "snapshot" and event.get("copy_s"):
                self._disturb(iteration)

    def _add(self, number: int, seconds: float) -> None:
        self._times_by_number.setdefault(number, []).append((seconds, self._stalled_s))
        if self._first is None or number < self._first:
            self._first = number
            self._undisturbed, self._without_stalls, self._all = [], [], []
            for earlier, times in self._times_by_number.items():
                for time in times:
                    self._count(earlier, *time)
        else:
            self._count(number, seconds, self._stalled_s)

    def _count(self, number: int, seconds: float, stalled_s: float) -> None:
        if not self._is_warm_up(number):
            insort(self._all, seconds)
            insort(self._without_stalls, seconds - stalled_s)
            if number not in self._disturbed:
                insort(self._undisturbed, seconds)

    def _disturb(self, iteration: int | None) -> None:
        """Excludes an iteration that copied a snapshot, and the next one."""
        for number in () if iteration is None else (iteration, iteration + 1):
            if number not in self._disturbed and not self._is_warm_up(number):
                for seconds, _ in self._times_by_number.get(number, ()):
                    del self._undisturbed[bisect_left(self._undisturbed, seconds)]
            self._disturbed.add(number)

    def _is_warm_up(self, number: int) -> bool:
        return self._first is None or number < self._first + _WARM_UP


def faults(events: Iterable[Event]) -> list[tuple[float, int]]:
    """Returns the times of kills, in Unix seconds, and the number of workers killed together."""
    groups: list[tuple[float, int]] = []
    for event in filter(is_kill, events):
        if groups and event["time"] - groups[-1][0] < TOGETHER_S:
            groups[-1] = groups[-1][0], groups[-1][1] + 1
        else:
            groups.append((event["time"], 1))
    return groups


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
    reported = [(event["time"] - event["met_s"] - event["noticed_s"], 1) for event in lived]
    at, lost = max(faults(stretch) or reported, default=(None, 0))
    if resume is None or at is None:
        return None
    started = resume["time"] - resume["seconds"]
    replays = [e for e in stretch if e["type"] == "replay" and started <= e["time"] <= resume["time"]]
    # the replacement of a lost rank 0 did not witness the loss, so the time when the others stopped is unknown
    stopped = next((time for time in (e["time"] - e["met_s"] for e in lived) if time >= at), at)
    parts = RecoveryCosts(
        detect_s=stopped - at,
        regroup_s=max(0.0, started - stopped),
        transfer_s=max(0.0, resume["seconds"] - sum(e["seconds"] for e in replays)),
        warm_up_s=max(0.0, stretch[-1]["time"] - resume["time"] - usual_s),
        frozen_s=_mean(e["seconds"] for e in replays if e["frozen"]),
        alone_s=_mean(e["seconds"] for e in replays if not e["frozen"]),
    )
    return Recovered(lost, parts)


def fitted(recoveries: Sequence[Recovered]) -> RecoveryCosts:
    """Returns the mean of one or more recoveries, as a line over the number of workers lost together."""
    parts = [recovery.parts for recovery in recoveries]
    restarts = [part.restart_s for part in parts]
    detect_s = _mean(part.detect_s for part in parts if part.detect_s) or 0.0
    transfer_s, warm_up_s = fmean(part.transfer_s for part in parts), fmean(part.warm_up_s for part in parts)
    regroup_s = max(0.0, fmean(restarts) - detect_s - transfer_s - warm_up_s)
    further = fmean(recovery.lost for recovery in recoveries) - 1
    lost = [recovery.lost for recovery in recoveries]
    slope = linear_regression(lost, restarts).slope if len(set(lost)) > 1 else 0.0
    more_s = min(max(0.0, slope), regroup_s / further) if further else 0.0
    return RecoveryCosts(
        detect_s,
        regroup_s - further * more_s,
        transfer_s,
        warm_up_s,
        frozen_s=_mean(part.frozen_s for part in parts if part.frozen_s is not None),
        alone_s=_mean(part.alone_s for part in parts if part.alone_s is not None),
        more_s=more_s,
    )


def is_kill(event: Event) -> bool:
    """Returns whether an event is an injected fault that kills a worker."""
    return event["type"] == "inject" and event["action"] == "kill"


def _mean(seconds: Iterable[float]) -> float | None:
    """Returns the mean; None for an empty sequence."""
    seconds = list(seconds)
    return fmean(seconds) if seconds else None
