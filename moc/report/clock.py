"""Accounts for the wall clock of a run, and describes its recoveries, from its events; pure functions."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moc.simulate.profile import ByIteration, is_kill, recovered, stretches

Event = Mapping
"""Event of ``events.jsonl``; sequences of events are in file order, since clocks of nodes differ."""

_PAUSES = ("evaluation", "save", "exit")


@dataclass(frozen=True)
class Spent:
    """Seconds of the wall clock by use; they add up to the total.

    Attributes:
        useful_s: iterations that count, each at the duration of an undisturbed one.
        stalls_s: waits of training for snapshots.
        slower_s: other slowdown of iterations: concurrent copies, warm-up after a start.  Negative if most were faster
            than the median.
        again_s: iterations lost by a recovery, and iterations replayed to restore a state.
        recoveries_s: the rest of recoveries: detection, rebuilding and reconnecting, loading, a slow first iteration.
        stopped_s: downtime of a killed job until its restart.
        start_up_s: start-up from the launch of rank 0's process, at first or after an orderly exit, and changes of
            policy.
        pauses_s: evaluation, dense checkpoints, and saving at an orderly exit.
        other_s: the rest.
    """

    useful_s: float = 0.0
    stalls_s: float = 0.0
    slower_s: float = 0.0
    again_s: float = 0.0
    recoveries_s: float = 0.0
    stopped_s: float = 0.0
    start_up_s: float = 0.0
    pauses_s: float = 0.0
    other_s: float = 0.0

    @property
    def wall_s(self) -> float:
        """Total wall clock."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class RecoveryTimes:
    """Recovery, including all losses during it.

    Attributes:
        time: when training resumed, in Unix seconds.
        reasons: the launcher's descriptions of the losses; empty without a launcher.
        newest: the last iteration completed before the loss was detected.
        iteration: the iteration from which training resumed.
        detect_s: from the loss, or its report, until the survivors had stopped; None if unknown.
        outside_s: time outside of useful work, including lost and replayed iterations.
        workers: workers of the job.
        kept: workers that kept their state.
        stages: pipeline stages that replayed while others waited; empty if all replayed, or none.
        undone: completed iterations that were discarded, and trained again.
        replayed: iterations replayed to restore a state.
        exact: whether all undone and replayed iterations reproduced their loss; None if none could be compared.
        lost_tokens: share of their tokens that experts lost; 0 with exact policies.
    """

    time: float
    reasons: tuple[str, ...]
    newest: int
    iteration: int
    detect_s: float | None
    outside_s: float
    workers: int
    kept: int
    stages: tuple[int, ...]
    undone: int
    replayed: int
    exact: bool | None
    lost_tokens: float

    @property
    def again(self) -> int:
        """Iterations computed again: undone and replayed."""
        return self.undone + self.replayed


@dataclass(frozen=True)
class Undone:
    """Last iteration completed before a ``start``, and the events of the iterations that the start discarded."""

    newest: int
    iterations: tuple[Event, ...]


def history(events: Sequence[Event]) -> tuple[dict[int, Event], dict[int, Undone]]:
    """Returns iterations that count, by number, and the iterations that each ``start`` discarded, by its ``id``."""
    counted, undone, newest = ByIteration[Event](), {}, 0
    for event in events:
        if event["type"] == "start":
            gone = counted.undo(event["iteration"])
            undone[id(event)] = Undone(newest, tuple(gone))
            newest = max(counted, default=0) if gone else newest
        elif event["type"] == "iteration":
            counted[event["iteration"]] = event
            newest = max(newest, event["iteration"])
    return counted, undone


def wall_clock(events: Sequence[Event], usual_s: float) -> tuple[Spent, tuple[RecoveryTimes, ...]]:
    """Returns the uses of the wall clock and all recoveries; an undisturbed iteration takes ``usual_s``."""
    walk = _Walk(events, usual_s)
    recoveries = tuple(walk.recoveries())
    return Spent(**walk.spent), recoveries


def began(events: Sequence[Event]) -> float:
    """Returns the start of rank 0's process in Unix seconds; without a ``start``, the time of the first event."""
    first = next((event for event in events if event["type"] == "start"), None)
    return min([events[0]["time"], *([] if first is None else [_process_began(first)])])


def _process_began(start: Event) -> float:
    return start["time"] - sum(start.get("startup_s", {}).values())


class _Walk:
    """Pass over the events that assigns the time between them to its uses."""

    def __init__(self, events: Sequence[Event], usual_s: float):
        self.spent: dict[str, float] = defaultdict(float)
        self._events, self._usual_s = events, usual_s
        counted, self._undone = history(events)
        self._final, self._counted = counted, {id(event) for event in counted.values()}
        lost = list(stretches(events))
        self._stretch_of = {id(event): stretch for stretch in lost for event in stretch}
        self._mark = began(events)  # all time before it is accounted for
        self._since: list[Event] = []  # events after the mark
        self._lost = False  # whether one of them is a loss
        self._fresh, self._ended = True, False  # the next start is no recovery; the job was down before it
        self._stalled_s, self._workers = 0.0, 1

    def recoveries(self) -> Iterator[RecoveryTimes]:
        """Yields finished recoveries; afterwards all time is accounted for."""
        for event in self._events:
            self._since.append(event)
            self._lost |= _is_loss(event)
            self._workers = event.get("world_size", self._workers)
            stretch = self._stretch_of.get(id(event))
            if stretch is None:
                self._outside(event)
            elif event is stretch[-1]:
                yield self._recovered(stretch)
        self._pass("recoveries_s" if self._lost else "other_s", self._events[-1]["time"])

    def _pass(self, part: str, until: float) -> None:
        self.spent[part] += until - self._mark
        self._mark, self._since, self._lost = until, [], False

    def _outside(self, event: Event) -> None:
        """Handles an event outside of any finished recovery."""
        kind, time = event["type"], event["time"]
        if kind == "iteration":
            self._pass("other_s", time - event["elapsed_s"])
            self._trained(event)
            self._mark = time
        elif kind == "start":
            if self._ended:  # the downtime after an orderly exit does not count
                self._mark, self._ended = max(self._mark, _process_began(event)), False
            self._pass("start_up_s" if self._fresh else "recoveries_s", time)
        elif kind in _PAUSES:
            self._pass("pauses_s", time)
            self._ended |= kind == "exit"
            self._fresh |= kind == "exit"
        elif kind == "stall":
            self._stalled_s += event["seconds"]
        elif _is_loss(event):
            self._fresh = self._ended = False
        elif kind == "resume" and event.get("tier") == "live" and not self._lost:
            self._fresh = True  # a change of policy

    def _trained(self, event: Event) -> None:
        stalled_s, self._stalled_s, self._fresh = self._stalled_s, 0.0, False
        if id(event) in self._counted:
            self.spent["useful_s"] += self._usual_s
            self.spent["stalls_s"] += stalled_s
            self.spent["slower_s"] += event["elapsed_s"] - stalled_s - self._usual_s
        else:
            self.spent["again_s"] += event["elapsed_s"]

    def _recovered(self, stretch: Sequence[Event]) -> RecoveryTimes:
        window_s, window = stretch[-1]["time"] - self._mark, self._since
        given_up = [self._undone[id(event)] for event in of_kind("start", stretch)]
        undone = {id(event): event for one in given_up for event in one.iterations}
        trained = of_kind("iteration", window)
        for event in trained:
            self.spent["useful_s" if id(event) in self._counted else "again_s"] += self._seconds(event)
        again_s, stopped_s = sum(event["seconds"] for event in of_kind("replay", stretch)), self._stopped_s(window)
        trained_s = sum(map(self._seconds, trained))
        self.spent["again_s"] += again_s
        self.spent["stopped_s"] += stopped_s
        self.spent["recoveries_s"] += window_s - trained_s - again_s - stopped_s
        kept_s = sum(self._seconds(event) for event in trained if id(event) not in undone)
        within = set(map(id, trained))
        before_s = sum(self._seconds(event) for event in undone.values() if id(event) not in within)
        self._mark, self._since, self._stalled_s = stretch[-1]["time"], [], 0.0
        self._fresh = self._ended = self._lost = False
        return self._told(stretch, window_s - kept_s + before_s, given_up)

    def _told(self, stretch: Sequence[Event], outside_s: float, given_up: Sequence[Undone]) -> RecoveryTimes:
        resume, replays = (of_kind("resume", stretch) or [{}])[-1], of_kind("replay", stretch)
        undone = [event for one in given_up for event in one.iterations]
        parts = recovered(stretch, self._usual_s)
        compared = [event["exact"] for event in replays if event.get("exact") is not None]
        repeated = [(event, self._final[n]) for event in undone if (n := event["iteration"]) in self._final]
        compared += [all(a.get(name) == b.get(name) for name in ("loss", "grad_norm")) for a, b in repeated]
        return RecoveryTimes(
            time=stretch[-1]["time"],
            reasons=tuple(event["reason"] for event in of_kind("generation", stretch)),
            newest=given_up[0].newest,
            iteration=of_kind("start", stretch)[-1]["iteration"],
            detect_s=parts and parts.parts.detect_s or None,
            outside_s=outside_s,
            workers=self._workers,
            kept=resume.get("kept", 0),
            stages=tuple(resume.get("stages", ())),
            undone=len(undone),
            replayed=len(replays),
            exact=all(compared) if compared else None,
            lost_tokens=sum(event["raised_by"] for event in of_kind("lost", stretch)),
        )

    def _seconds(self, event: Event) -> float:
        """Returns the duration booked for an iteration; in a recovery, any excess belongs to the recovery."""
        stretch = self._stretch_of.get(id(event))
        usual = stretch is not None and (id(event) in self._counted or event is stretch[-1])
        return self._usual_s if usual else event["elapsed_s"]

    def _stopped_s(self, window: Sequence[Event]) -> float:
        """Returns the seconds without any worker, before starts that no launcher announced as a new generation."""
        seconds, newest, regrouped = 0.0, self._mark, False
        times = sorted(event["time"] for event in window)
        for event in window:
            regrouped |= event["type"] == "generation"
            if event["type"] == "start":
                begun = _process_began(event)
                earlier = bisect_left(times, begun)
                newest = max(newest, times[earlier - 1]) if earlier else newest
                seconds += 0.0 if regrouped else max(0.0, begun - newest)
                newest, regrouped = event["time"], False
        return seconds


def _is_loss(event: Event) -> bool:
    return event["type"] == "generation" or is_kill(event)


def of_kind(kind: str, events: Sequence[Event]) -> list[Event]:
    """Returns the events of one type."""
    return [event for event in events if event["type"] == kind]
