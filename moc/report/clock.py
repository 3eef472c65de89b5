"""Where the wall clock of a run went, and what its recoveries were like, from its events; pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from moc.simulate.recoveries import is_kill, recovered, stretches

Event = Mapping
"""One of ``events.jsonl``, in its order: clocks of several nodes differ."""

_PAUSES = ("evaluation", "save", "exit")


@dataclass(frozen=True)
class Spent:
    """Seconds of the wall clock, which is their sum.

    Attributes:
        useful_s: iterations that count, each for as long as one takes that nothing disturbs.
        stalls_s: they have waited for snapshots.
        slower_s: by which they were slower for other reasons: copies beside them, the first ones after a start. Below 0
            where most were faster than the median.
        again_s: iterations that were lost by a recovery, and those that it computed again to have a state.
        recoveries_s: the rest of recoveries: noticing, building and connecting anew, loading, a slow first iteration.
        stopped_s: a killed job was not there, until it was started again.
        start_up_s: from the first worker's begin, at first or after an orderly end, and where another policy was put
            in force.
        pauses_s: evaluation, dense checkpoints, and what is saved at an orderly end.
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
        """All of it."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class RecoveryTimes:
    """A recovery, with all losses that came while it was under way.

    Attributes:
        time: Unix seconds, when training went on.
        reasons: what was lost, as the launcher said it; without one, nothing is said.
        newest: iteration that was complete when it was heard of.
        iteration: that training went on from.
        detect_s: from the loss, or the news of it, until those that were left had stopped; None if that is not known.
        outside_s: outside of useful work, with what was computed in vain and again.
        workers: of the job.
        kept: of them, that kept their state.
        stages: pipeline stages that computed again while others waited; none if all did, or nothing was computed.
        undone: complete iterations that were given up, and computed again in training.
        replayed: iterations that were computed again to have a state.
        exact: whether all of both had the loss again that they had had; None if that is not known of any.
        lost_tokens: share of their tokens that experts lost; 0 with policies that lose none.
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
        """Iterations computed again, one way or the other."""
        return self.undone + self.replayed


@dataclass(frozen=True)
class Undone:
    """What a ``start`` has given up.

    Attributes:
        newest: iteration that was complete before it.
        iterations: events of those beyond the one that it goes on from.
    """

    newest: int
    iterations: tuple[Event, ...]


def history(events: Sequence[Event]) -> tuple[dict[int, Event], dict[int, Undone]]:
    """Iterations that count, by number; and by the ``id`` of each ``start``, what it has given up."""
    counted: dict[int, Event] = {}
    undone = {}
    for event in events:
        if event["type"] == "start":
            gone = [number for number in counted if number > event["iteration"]]
            newest = max(counted, default=0)
            undone[id(event)] = Undone(newest, tuple(counted.pop(number) for number in gone))
        elif event["type"] == "iteration":
            counted[event["iteration"]] = event
    return counted, undone


def wall_clock(events: Sequence[Event], usual_s: float) -> tuple[Spent, tuple[RecoveryTimes, ...]]:
    """Where the time went, and all recoveries.

    Args:
        events: of a run, at least one.
        usual_s: seconds of an iteration that nothing disturbs.
    """
    walk = _Walk(events, usual_s)
    recoveries = tuple(walk.recoveries())
    return Spent(**walk.spent), recoveries


def began(events: Sequence[Event]) -> float:
    """Unix seconds, when the first worker's process began; without a ``start``, the first event."""
    first = next((event for event in events if event["type"] == "start"), None)
    return min([events[0]["time"], *([] if first is None else [_process_began(first)])])


def _process_began(start: Event) -> float:
    return start["time"] - sum(start.get("startup_s", {}).values())


class _Walk:
    """Goes through the events, and says of the time between two of them what it went to."""

    def __init__(self, events: Sequence[Event], usual_s: float):
        self.spent: dict[str, float] = defaultdict(float)
        self._events, self._usual_s = events, usual_s
        counted, self._undone = history(events)
        self._final, self._counted = counted, {id(event) for event in counted.values()}
        lost = list(stretches(events))
        self._stretch_of = {id(event): stretch for stretch in lost for event in stretch}
        self._mark = began(events)  # what was before is accounted for
        self._since: list[Event] = []  # events after it
        self._fresh, self._ended = True, False  # a start that follows is no recovery; the job was not there before it
        self._stalled_s, self._workers = 0.0, 1

    def recoveries(self) -> Iterator[RecoveryTimes]:
        """Those that are over; afterwards all time is accounted for."""
        for event in self._events:
            self._since.append(event)
            self._workers = event.get("world_size", self._workers)
            stretch = self._stretch_of.get(id(event))
            if stretch is None:
                self._outside(event)
            elif event is stretch[-1]:
                yield self._recovered(stretch)
        self._pass("recoveries_s" if any(map(_is_loss, self._since)) else "other_s", self._events[-1]["time"])

    def _pass(self, part: str, until: float) -> None:
        self.spent[part] += until - self._mark
        self._mark, self._since = until, []

    def _outside(self, event: Event) -> None:
        """An event that belongs to no recovery, or to one that is not over."""
        kind, time = event["type"], event["time"]
        if kind == "iteration":
            self._pass("other_s", time - event["elapsed_s"])
            self._trained(event)
            self._mark = time
        elif kind == "start":
            if self._ended:  # how long it was away says nothing of it
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
        elif kind == "resume" and event.get("tier") == "live" and not any(map(_is_loss, self._since)):
            self._fresh = True  # another policy

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
        self._fresh = self._ended = False
        return self._told(stretch, window_s - kept_s + before_s, given_up)

    def _told(self, stretch: Sequence[Event], outside_s: float, given_up: Sequence[Undone]) -> RecoveryTimes:
        resume, replays = (of_kind("resume", stretch) or [{}])[-1], of_kind("replay", stretch)
        undone = [event for one in given_up for event in one.iterations]
        parts = recovered(stretch, self._usual_s)
        compared = [event["exact"] for event in replays if event.get("exact") is not None]
        compared += [_same(event, self._final[n]) for event in undone if (n := event["iteration"]) in self._final]
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
        """That an iteration is worth: within a recovery, whatever is more belongs to that."""
        stretch = self._stretch_of.get(id(event))
        usual = stretch is not None and (id(event) in self._counted or event is stretch[-1])
        return self._usual_s if usual else event["elapsed_s"]

    def _stopped_s(self, window: Sequence[Event]) -> float:
        """For how long no worker was there, where no launcher told of a new generation."""
        seconds, newest, regrouped = 0.0, self._mark, False
        for event in window:
            regrouped |= event["type"] == "generation"
            if event["type"] == "start":
                begun = _process_began(event)
                newest = max([newest, *(other["time"] for other in window if other["time"] < begun)])
                seconds += 0.0 if regrouped else max(0.0, begun - newest)
                newest, regrouped = event["time"], False
        return seconds


def _same(event: Event, again: Event) -> bool:
    """Whether an iteration that was computed again came out as before, as far as events tell."""
    return all(event.get(name) == again.get(name) for name in ("loss", "grad_norm"))


def _is_loss(event: Event) -> bool:
    return event["type"] == "generation" or is_kill(event)


def of_kind(kind: str, events: Sequence[Event]) -> list[Event]:
    """The events of one type."""
    return [event for event in events if event["type"] == kind]
