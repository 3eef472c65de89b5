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
class DiscardedIterations:
    """Last iteration completed before a ``start``, and the events of the iterations that the start discarded."""

    newest: int
    iterations: tuple[Event, ...]


def counted_iterations(events: Sequence[Event]) -> tuple[dict[int, Event], dict[int, DiscardedIterations]]:
    """Returns iterations that count, by number, and the iterations that each ``start`` discarded, by its ``id``."""
    counted, discarded_by_start, newest = ByIteration[Event](), {}, 0
    for event in events:
        if event["type"] == "start":
            discarded = counted.undo(event["iteration"])
            discarded_by_start[id(event)] = DiscardedIterations(newest, tuple(discarded))
            newest = max(counted, default=0) if discarded else newest
        elif event["type"] == "iteration":
            counted[event["iteration"]] = event
            newest = max(newest, event["iteration"])
    return counted, discarded_by_start


def account_wall_clock(events: Sequence[Event], undisturbed_s: float) -> tuple[Spent, tuple[RecoveryTimes, ...]]:
    """Returns the uses of the wall clock and all recoveries; an undisturbed iteration takes ``undisturbed_s``."""
    accounting = _Accounting(events, undisturbed_s)
    recoveries = tuple(accounting.recoveries())
    return Spent(**accounting.spent), recoveries


def run_start(events: Sequence[Event]) -> float:
    """Returns the start of rank 0's process in Unix seconds; without a ``start``, the time of the first event."""
    first = next((event for event in events if event["type"] == "start"), None)
    return min([events[0]["time"], *([] if first is None else [_process_start(first)])])


def _process_start(start: Event) -> float:
    return start["time"] - sum(start.get("startup_s", {}).values())


class _Accounting:
    """Pass over the events that assigns the time between them to its uses."""

    def __init__(self, events: Sequence[Event], undisturbed_s: float):
        self.spent: dict[str, float] = defaultdict(float)
        self._events, self._undisturbed_s = events, undisturbed_s
        counted, self._discarded_by_start = counted_iterations(events)
        self._final, self._counted = counted, {id(event) for event in counted.values()}
        lost = list(stretches(events))
        self._stretch_of = {id(event): stretch for stretch in lost for event in stretch}
        self._accounted_until = run_start(events)  # all time before it is accounted for
        self._pending_events: list[Event] = []  # events after the mark
        self._has_loss = False  # whether one of them is a loss
        self._starts_without_recovery, self._is_down = (
            True,
            False,
        )  # the next start is no recovery; the job was down before it
        self._stalled_s, self._workers = 0.0, 1

    def recoveries(self) -> Iterator[RecoveryTimes]:
        """Yields finished recoveries; afterwards all time is accounted for."""
        for event in self._events:
            self._pending_events.append(event)
            self._has_loss |= _is_loss(event)
            self._workers = event.get("world_size", self._workers)
            stretch = self._stretch_of.get(id(event))
            if stretch is None:
                self._book_event(event)
            elif event is stretch[-1]:
                yield self._book_recovery(stretch)
        self._book_until("recoveries_s" if self._has_loss else "other_s", self._events[-1]["time"])

    def _book_until(self, part: str, until: float) -> None:
        self.spent[part] += until - self._accounted_until
        self._accounted_until, self._pending_events, self._has_loss = until, [], False

    def _book_event(self, event: Event) -> None:
        """Handles an event outside of any finished recovery."""
        kind, time = event["type"], event["time"]
        if kind == "iteration":
            self._book_until("other_s", time - event["elapsed_s"])
            self._book_iteration(event)
            self._accounted_until = time
        elif kind == "start":
            if self._is_down:  # the downtime after an orderly exit does not count
                self._accounted_until, self._is_down = max(self._accounted_until, _process_start(event)), False
            self._book_until("start_up_s" if self._starts_without_recovery else "recoveries_s", time)
        elif kind in _PAUSES:
            self._book_until("pauses_s", time)
            self._is_down |= kind == "exit"
            self._starts_without_recovery |= kind == "exit"
        elif kind == "stall":
            self._stalled_s += event["seconds"]
        elif _is_loss(event):
            self._starts_without_recovery = self._is_down = False
        elif kind == "resume" and event.get("tier") == "live" and not self._has_loss:
            self._starts_without_recovery = True  # a change of policy

    def _book_iteration(self, event: Event) -> None:
        stalled_s, self._stalled_s, self._starts_without_recovery = self._stalled_s, 0.0, False
        if id(event) in self._counted:
            self.spent["useful_s"] += self._undisturbed_s
            self.spent["stalls_s"] += stalled_s
            self.spent["slower_s"] += event["elapsed_s"] - stalled_s - self._undisturbed_s
        else:
            self.spent["again_s"] += event["elapsed_s"]

    def _book_recovery(self, stretch: Sequence[Event]) -> RecoveryTimes:
        window_s, window = stretch[-1]["time"] - self._accounted_until, self._pending_events
        discarded = [self._discarded_by_start[id(event)] for event in events_of_type("start", stretch)]
        undone = {id(event): event for discard in discarded for event in discard.iterations}
        trained = events_of_type("iteration", window)
        for event in trained:
            self.spent["useful_s" if id(event) in self._counted else "again_s"] += self._booked_s(event)
        again_s, stopped_s = (
            sum(event["seconds"] for event in events_of_type("replay", stretch)),
            self._stopped_s(window),
        )
        trained_s = sum(map(self._booked_s, trained))
        self.spent["again_s"] += again_s
        self.spent["stopped_s"] += stopped_s
        self.spent["recoveries_s"] += window_s - trained_s - again_s - stopped_s
        kept_s = sum(self._booked_s(event) for event in trained if id(event) not in undone)
        trained_ids = set(map(id, trained))
        before_s = sum(self._booked_s(event) for event in undone.values() if id(event) not in trained_ids)
        self._accounted_until, self._pending_events, self._stalled_s = stretch[-1]["time"], [], 0.0
        self._starts_without_recovery = self._is_down = self._has_loss = False
        return self._describe_recovery(stretch, window_s - kept_s + before_s, discarded)

    def _describe_recovery(
        self, stretch: Sequence[Event], outside_s: float, discarded: Sequence[DiscardedIterations]
    ) -> RecoveryTimes:
        resume, replays = (events_of_type("resume", stretch) or [{}])[-1], events_of_type("replay", stretch)
        undone = [event for discard in discarded for event in discard.iterations]
        parts = recovered(stretch, self._undisturbed_s)
        compared = [event["exact"] for event in replays if event.get("exact") is not None]
        repeated = [(event, self._final[n]) for event in undone if (n := event["iteration"]) in self._final]
        compared += [all(a.get(name) == b.get(name) for name in ("loss", "grad_norm")) for a, b in repeated]
        return RecoveryTimes(
            time=stretch[-1]["time"],
            reasons=tuple(event["reason"] for event in events_of_type("generation", stretch)),
            newest=discarded[0].newest,
            iteration=events_of_type("start", stretch)[-1]["iteration"],
            detect_s=parts and parts.parts.detect_s or None,
            outside_s=outside_s,
            workers=self._workers,
            kept=resume.get("kept", 0),
            stages=tuple(resume.get("stages", ())),
            undone=len(undone),
            replayed=len(replays),
            exact=all(compared) if compared else None,
            lost_tokens=sum(event["raised_by"] for event in events_of_type("lost", stretch)),
        )

    def _booked_s(self, event: Event) -> float:
        """Returns the duration booked for an iteration; in a recovery, any excess belongs to the recovery."""
        stretch = self._stretch_of.get(id(event))
        is_undisturbed = stretch is not None and (id(event) in self._counted or event is stretch[-1])
        return self._undisturbed_s if is_undisturbed else event["elapsed_s"]

    def _stopped_s(self, window: Sequence[Event]) -> float:
        """Returns the seconds without any worker, before starts that no launcher announced as a new generation."""
        seconds, newest, has_new_generation = 0.0, self._accounted_until, False
        times = sorted(event["time"] for event in window)
        for event in window:
            has_new_generation |= event["type"] == "generation"
            if event["type"] == "start":
                process_start = _process_start(event)
                earlier_events = bisect_left(times, process_start)
                newest = max(newest, times[earlier_events - 1]) if earlier_events else newest
                seconds += 0.0 if has_new_generation else max(0.0, process_start - newest)
                newest, has_new_generation = event["time"], False
        return seconds


def _is_loss(event: Event) -> bool:
    return event["type"] == "generation" or is_kill(event)


def events_of_type(event_type: str, events: Sequence[Event]) -> list[Event]:
    """Returns the events of one type."""
    return [event for event in events if event["type"] == event_type]
