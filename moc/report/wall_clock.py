"""Accounts for the wall clock of a run, and describes its recoveries, from events that arrive one by one."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from moc.files.event_log import RecordedLoss, losses_of
from moc.simulate.policy_costs import RecoveryCosts
from moc.simulate.profile import ByIteration, RecoveryFinder, is_kill, recovered

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
        losses: losses of workers and nodes, oldest first; without a launcher, at most one, by an injected fault.
        newest: the last iteration completed before the loss was detected.
        iteration: iteration of the state that training resumed from.
        detect_s: from the loss, or its report, until the survivors had stopped; None if unknown.
        phases: seconds of each phase, by its name; empty if the time of the loss is unknown.  Detection and
            reconnection also show where nothing was loaded.
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
    losses: tuple[RecordedLoss, ...]
    newest: int
    iteration: int
    detect_s: float | None
    phases: Mapping[str, float]
    outside_s: float
    workers: int
    kept: int
    stages: tuple[int, ...]
    undone: int
    replayed: int
    exact: bool | None
    lost_tokens: float

    @property
    def repeated(self) -> int:
        """Iterations computed again: undone and replayed."""
        return self.undone + self.replayed


PHASES = ("detection", "reconnection", "load", "replay", "first iteration")
"""Phases of a recovery, in order."""


@dataclass
class TrainedIteration:
    """An iteration event with its accounting.

    Attributes:
        event: the event; of a long run, only the fields that accounts need.
        is_counted: whether no later ``start`` has discarded it.
        stalled_s: seconds of stalls in it.
        is_booked: whether its time is accounted for.
        in_recovery: whether it was trained in a finished recovery.
        ends_recovery: whether it is the last one of a recovery.
    """

    event: Event
    is_counted: bool = True
    stalled_s: float = 0.0
    is_booked: bool = False
    in_recovery: bool = False
    ends_recovery: bool = False

    @property
    def booked(self) -> tuple[float, int]:
        """Duration booked in a recovery: seconds, and undisturbed iterations; any excess belongs to the recovery."""
        is_undisturbed = self.in_recovery and (self.is_counted or self.ends_recovery)
        return (0.0, 1) if is_undisturbed else (self.event["elapsed_s"], 0)


@dataclass(frozen=True)
class _Recovery:
    """A finished recovery; its description depends on later events, which may discard its iterations."""

    events: Sequence[Event]
    window_s: float
    kept: Sequence[TrainedIteration]  # trained within the window, and not discarded in it
    before: Sequence[TrainedIteration]  # discarded, and trained before the window
    undone: Sequence[TrainedIteration]
    newest: int
    workers: int


_ACCOUNTED_FIELDS = ("type", "time", "iteration", "elapsed_s", "tokens", "skipped", "loss", "grad_norm")


@dataclass
class WallClock:
    """Accounts of the wall clock, from events that arrive one by one.

    The duration of an undisturbed iteration is known only at the end.  So each part is a sum of seconds and of
    undisturbed iterations.

    Attributes:
        keeps_events: whether iterations keep all fields of their events, for further figures.
        counted: iterations that count, by number.
        began: start of rank 0's process in Unix seconds; without a ``start``, the time of the first event.
        tokens: tokens of the iterations that count.
        skipped: iterations that count, and skipped their update.
        computed: all iterations, including discarded ones.
    """

    keeps_events: bool = True
    counted: ByIteration[TrainedIteration] = field(default_factory=ByIteration)
    began: float = 0.0
    tokens: int = 0
    skipped: int = 0
    computed: int = 0
    _seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _undisturbed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _finder: RecoveryFinder = field(default_factory=RecoveryFinder)
    _trained: dict[int, TrainedIteration] = field(default_factory=dict)  # not booked or in the window, by event id
    _discarded: dict[int, tuple[int, list[TrainedIteration]]] = field(default_factory=dict)  # by id of the start
    _recoveries: list[_Recovery] = field(default_factory=list)
    _window: list[Event] = field(default_factory=list)  # events after the mark, which keep their ids unique
    _newest: int = 0  # last iteration completed before a start
    _last: float | None = None  # time of the last event
    _accounted_until: float = 0.0  # all time before it is accounted for
    _has_start: bool = False
    _has_loss: bool = False  # whether an event of the window is a loss
    _starts_without_recovery: bool = True  # the next start is no recovery
    _is_down: bool = False  # the job was down before the next start
    _stalled_s: float = 0.0
    _workers: int = 1

    @property
    def is_recovering(self) -> bool:
        """Whether the newest recovery is not finished."""
        return bool(self._finder.pending)

    def add(self, event: Event) -> tuple[list[Event], bool]:
        """Adds the next event; returns as :meth:`RecoveryFinder.add`."""
        if self._last is None:
            self.began = self._accounted_until = event["time"]
        self._last = event["time"]
        if event["type"] == "start":
            self._set_began(event)
            self._discard(event)
        elif event["type"] == "iteration":
            self._count(event)
        decided, is_recovery = self._finder.add(event)
        for decided_event in decided:
            self._enter_window(decided_event)
            if not is_recovery:
                self._book_event(decided_event)
        if is_recovery:
            self._book_recovery(decided)
        return decided, is_recovery

    def spent(self, undisturbed_s: float) -> Spent:
        """Returns the uses of the wall clock until the newest event."""
        if self._last is None:
            return Spent()
        clock = copy.copy(self)  # an unfinished recovery is booked in the copy
        clock._seconds, clock._undisturbed = self._seconds.copy(), self._undisturbed.copy()
        clock._window, clock._discarded = list(self._window), self._discarded.copy()
        clock._trained = {key: replace(trained) for key, trained in self._trained.items()}
        for event in self._finder.pending:
            clock._enter_window(event)
            clock._book_event(event)
        clock._book_until("recoveries_s" if clock._has_loss else "other_s", self._last)
        parts = clock._seconds.keys() | clock._undisturbed.keys()
        seconds = {part: clock._seconds[part] + clock._undisturbed[part] * undisturbed_s for part in parts}
        return Spent(**{part: round(value, 9) for part, value in seconds.items()})

    def recoveries(self, undisturbed_s: float) -> tuple[RecoveryTimes, ...]:
        """Returns the finished recoveries, where an undisturbed iteration takes ``undisturbed_s`` seconds."""
        return tuple(self._describe(recovery, undisturbed_s) for recovery in self._recoveries)

    def _set_began(self, start: Event) -> None:
        if not self._has_start:
            began = min(self.began, _process_start(start))
            if self._accounted_until == self.began:
                self._accounted_until = began
            else:
                self._seconds["other_s"] += self.began - began
            self.began, self._has_start = began, True

    def _count(self, event: Event) -> None:
        number = event["iteration"]
        kept = event if self.keeps_events else {name: event[name] for name in _ACCOUNTED_FIELDS if name in event}
        if number in self.counted:
            self._set_counted(self.counted[number], False)
        self.counted[number] = self._trained[id(event)] = trained = TrainedIteration(kept, is_counted=False)
        self._set_counted(trained, True)
        self._newest, self.computed = max(self._newest, number), self.computed + 1

    def _discard(self, start: Event) -> None:
        discarded = self.counted.undo(start["iteration"])
        self._discarded[id(start)] = self._newest, discarded
        for trained in discarded:
            self._set_counted(trained, False)
        self._newest = (self.counted.last or 0) if discarded else self._newest

    def _set_counted(self, trained: TrainedIteration, is_counted: bool) -> None:
        if trained.is_booked:
            self._book_iteration(trained, -1)
        trained.is_counted, sign = is_counted, 1 if is_counted else -1
        self.tokens += sign * trained.event.get("tokens", 0)
        self.skipped += sign * bool(trained.event.get("skipped"))
        if trained.is_booked:
            self._book_iteration(trained)

    def _book(self, part: str, seconds: float, undisturbed: int = 0) -> None:
        self._seconds[part] += seconds
        self._undisturbed[part] += undisturbed

    def _book_iteration(self, trained: TrainedIteration, sign: int = 1) -> None:
        elapsed_s, stalled_s = trained.event["elapsed_s"], trained.stalled_s
        if trained.in_recovery:
            seconds, undisturbed = trained.booked
            self._book("useful_s" if trained.is_counted else "again_s", sign * seconds, sign * undisturbed)
            self._book("recoveries_s", -sign * seconds, -sign * undisturbed)
        elif trained.is_counted:
            self._book("useful_s", 0.0, sign)
            self._book("stalls_s", sign * stalled_s)
            self._book("slower_s", sign * (elapsed_s - stalled_s), -sign)
        else:
            self._book("again_s", sign * elapsed_s)

    def _enter_window(self, event: Event) -> None:
        self._window.append(event)
        self._has_loss |= _is_loss(event)
        self._workers = event.get("world_size", self._workers)

    def _close_window(self, until: float) -> None:
        for event in self._window:
            self._trained.pop(id(event), None)
            self._discarded.pop(id(event), None)
        self._accounted_until, self._window, self._has_loss = until, [], False

    def _book_until(self, part: str, until: float) -> None:
        self._book(part, until - self._accounted_until)
        self._close_window(until)

    def _book_event(self, event: Event) -> None:
        """Handles an event outside of any finished recovery."""
        kind, time = event["type"], event["time"]
        if kind == "iteration":
            trained = self._trained[id(event)]
            self._book_until("other_s", time - event["elapsed_s"])
            trained.stalled_s, trained.is_booked = self._stalled_s, True
            self._stalled_s, self._starts_without_recovery = 0.0, False
            self._book_iteration(trained)
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

    def _book_recovery(self, events: Sequence[Event]) -> None:
        window_s, starts = events[-1]["time"] - self._accounted_until, events_of_type("start", events)
        undone = [iteration for start in starts for iteration in self._discarded[id(start)][1]]
        trained = [self._trained[id(event)] for event in events_of_type("iteration", self._window)]
        replayed_s = sum(event["seconds"] for event in events_of_type("replay", events))
        stopped_s = self._stopped_s()
        for iteration in trained:
            iteration.is_booked, iteration.in_recovery, iteration.ends_recovery = True, True, iteration is trained[-1]
            self._book_iteration(iteration)
        self._book("again_s", replayed_s)
        self._book("stopped_s", stopped_s)
        self._book("recoveries_s", window_s - replayed_s - stopped_s)
        undone_ids, trained_ids = set(map(id, undone)), set(map(id, trained))
        kept = [iteration for iteration in trained if id(iteration) not in undone_ids]
        before = [
            iteration
            for iteration in {id(iteration): iteration for iteration in undone}.values()
            if id(iteration) not in trained_ids
        ]
        newest = self._discarded[id(starts[0])][0]
        self._recoveries.append(_Recovery(events, window_s, kept, before, undone, newest, self._workers))
        self._stalled_s = 0.0
        self._close_window(events[-1]["time"])
        self._starts_without_recovery = self._is_down = False

    def _describe(self, recovery: _Recovery, undisturbed_s: float) -> RecoveryTimes:
        def seconds(trained: Sequence[TrainedIteration]) -> float:
            return sum(
                booked_s + count * undisturbed_s for booked_s, count in (iteration.booked for iteration in trained)
            )

        events = recovery.events
        resume, replays = (events_of_type("resume", events) or [{}])[-1], events_of_type("replay", events)
        generations, kills = events_of_type("generation", events), list(filter(is_kill, events))
        losses = tuple(loss for event in events for loss in losses_of(event))
        parts = recovered(events, undisturbed_s)
        compared = [event["exact"] for event in replays if event.get("exact") is not None]
        repeated = [
            (iteration.event, self.counted[n].event)
            for iteration in recovery.undone
            if (n := iteration.event["iteration"]) in self.counted
        ]
        compared += [all(a.get(name) == b.get(name) for name in ("loss", "grad_norm")) for a, b in repeated]
        return RecoveryTimes(
            time=events[-1]["time"],
            losses=losses or tuple(RecordedLoss(rank=kill.get("rank")) for kill in kills[:1]),
            newest=recovery.newest,
            iteration=events_of_type("start", events)[-1]["iteration"],
            detect_s=parts and parts.parts.detect_s or None,
            phases=_phases(generations, replays, None if parts is None else parts.parts),
            outside_s=round(recovery.window_s - seconds(recovery.kept) + seconds(recovery.before), 9),
            workers=recovery.workers,
            kept=resume.get("kept", 0),
            stages=tuple(resume.get("stages", ())),
            undone=len(recovery.undone),
            replayed=len(replays),
            exact=all(compared) if compared else None,
            lost_tokens=sum(event["raised_by"] for event in events_of_type("lost", events)),
        )

    def _stopped_s(self) -> float:
        """Returns the seconds without any worker, before starts that no launcher announced as a new generation."""
        seconds, newest, has_new_generation = 0.0, self._accounted_until, False
        times = sorted(event["time"] for event in self._window)
        for event in self._window:
            has_new_generation |= event["type"] == "generation"
            if event["type"] == "start":
                process_start = _process_start(event)
                earlier_events = bisect_left(times, process_start)
                newest = max(newest, times[earlier_events - 1]) if earlier_events else newest
                seconds += 0.0 if has_new_generation else max(0.0, process_start - newest)
                newest, has_new_generation = event["time"], False
        return seconds


def _phases(generations: Sequence[Event], replays: Sequence[Event], parts: RecoveryCosts | None) -> Mapping[str, float]:
    """Returns the known seconds of each phase of a recovery, from its last loss on."""
    replayed_s = sum(event["seconds"] for event in replays)
    if parts is not None:
        times = (parts.detect_s, parts.regroup_s, parts.transfer_s, replayed_s, parts.warm_up_s)
        return dict(zip(PHASES, times, strict=True))
    phases = (
        {"detection": generations[-1]["noticed_s"], "reconnection": generations[-1]["met_s"]} if generations else {}
    )
    return phases | ({"replay": replayed_s} if replays else {})


def _process_start(start: Event) -> float:
    return start["time"] - sum(start.get("startup_s", {}).values())


def _is_loss(event: Event) -> bool:
    return event["type"] == "generation" or is_kill(event)


def events_of_type(event_type: str, events: Sequence[Event]) -> list[Event]:
    """Returns the events of one type."""
    return [event for event in events if event["type"] == event_type]
