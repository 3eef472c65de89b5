"""The state of a run, built from events that arrive one by one: shared by report, metrics, page and terminal."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from moc.files.event_log import RecordedLoss, losses_of
from moc.report.wall_clock import Event, RecoveryTimes, Spent, TrainedIteration, WallClock
from moc.simulate.profile import IterationTimes


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


@dataclass
class Totals:
    """Events of one type: their number, and the sum of each numeric field."""

    count: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, event: Event) -> None:
        """Adds an event."""
        self.count += 1
        for name, value in event.items():
            if isinstance(value, int | float) and name != "time" and -_MAX_SUMMAND <= value <= _MAX_SUMMAND:
                self.sums[name] += value

    def sum(self, name: str) -> float:
        """Returns the sum of a field; 0 without events."""
        return self.sums.get(name, 0.0)

    def mean(self, name: str) -> float | None:
        """Returns the mean of a field that all these events have; None without events."""
        return self.sums[name] / self.count if self.count else None


NO_EVENTS = Totals()
"""Totals of a type without events."""

FREQUENT_TYPES = ("iteration", "snapshot", "stall", "replicate", "persist", "replay", "fold")
"""Types of events that may occur in each iteration."""

_REQUIRED = {
    "iteration": ("iteration", "elapsed_s", "tokens"),
    "snapshot": ("iteration",),
    "replicate": ("iteration",),
    "persist": ("iteration",),
    "start": ("iteration",),
    "stall": ("seconds",),
    "generation": ("reason", "noticed_s", "met_s"),
    "resume": ("seconds",),
    "replay": ("seconds", "frozen"),
    "evaluation": ("split", "loss"),
    "inject": ("action",),
    "lost": ("raised_by",),
    "storage_silent": ("where", "waits"),
    "expert_replicas": ("least", "fewer", "experts", "wanted"),
    "rebalance": ("busiest_after",),
    "memory": ("own", "copies", "experts", "small", "logs"),
}
"""By type, the fields that the state needs."""

_DISTINGUISHING = ("action", "what", "tier", "cause", "split")
_RECENT, _HISTORY = 100, 2000
_MAX_SUMMAND = 1e300  # larger numbers, infinity and nan of a foreign file are not summed


@dataclass(frozen=True)
class RunState:
    """State of a run after some of its events.  Sequences are in file order.

    Attributes:
        iterations: iterations that count, by number.  A view: it changes with the fold.
        history: the newest of these, in order.
        computed: iterations computed in training, including repeated ones.
        tokens: tokens of iterations that count.
        skipped: iterations that count, without an update.
        iteration_s: median seconds of an undisturbed iteration; 0 before the first iteration.
        began: start of the run, in Unix seconds.
        spent: uses of the wall clock.
        recoveries: finished recoveries.
        is_recovering: whether a loss is not recovered yet.
        newest: newest event, by type.
        totals: number of events and sums of their fields, by type.
        counts: number of events by type and by a field that distinguishes them, such as ``cause`` or ``tier``; the
            type ``loss`` has all losses by cause.
        losses: the newest losses of workers and nodes, each with the time of its event in Unix seconds.
        unrecovered: of these, the losses since the newest recovery has ended.
        periods: periods of training, with the number of workers in each.
        validation: newest validation loss, by split.
        recent: newest events of types that do not occur in each iteration.
        ended: reason of the exit, or of the loss that ended the job; None if it is not known, or training has begun
            since.
        exit_code: exit code of that end; None if it is not known.
        time: Unix seconds of the newest event; 0 without events.
    """

    iterations: Mapping[int, TrainedIteration]
    history: Sequence[tuple[int, TrainedIteration]]
    computed: int
    tokens: int
    skipped: int
    iteration_s: float
    began: float
    spent: Spent
    recoveries: tuple[RecoveryTimes, ...]
    is_recovering: bool
    newest: Mapping[str, Event]
    totals: Mapping[str, Totals]
    counts: Mapping[tuple[str, str], int]
    losses: Sequence[tuple[float, RecordedLoss]]
    unrecovered: Sequence[tuple[float, RecordedLoss]]
    periods: tuple[Period, ...]
    validation: Mapping[str, float]
    recent: tuple[Event, ...]
    ended: str | None
    exit_code: int | None
    time: float

    @property
    def ettr(self) -> float:
        """Effective training time ratio: share of useful work in the wall clock so far."""
        return self.spent.useful_s / self.spent.wall_s if self.spent.wall_s > 0 else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the wall clock so far."""
        return self.tokens / self.spent.wall_s if self.spent.wall_s > 0 else 0.0

    @property
    def workers(self) -> int:
        """Workers of the newest start."""
        return self.newest.get("start", {}).get("world_size", 1)

    @property
    def last_iteration(self) -> int:
        """The newest iteration that counts; 0 without one."""
        return self.history[-1][0] if self.history else 0

    @property
    def newest_snapshots(self) -> dict[str, Event]:
        """The event of the newest snapshot by place: ``memory`` or ``buffers`` (tier disk), ``peers``, ``storage``."""
        by_place = {"memory": "snapshot", "peers": "replicate", "storage": "persist"}
        events = {place: self.newest[kind] for place, kind in by_place.items() if kind in self.newest}
        if events.get("memory", {}).get("tier") == "disk":  # a killed worker loses them
            events = {"buffers": events.pop("memory")} | events
        return events

    def of_type(self, event_type: str) -> Totals:
        """Returns the totals of a type of event."""
        return self.totals.get(event_type, NO_EVENTS)


class RunFold:
    """Builds the state of a run from its events, which :meth:`add` takes in file order.

    Args:
        keeps_events: whether to keep all fields of the events of iterations, for further figures.
    """

    def __init__(self, keeps_events: bool = True):
        self._clock, self._times = WallClock(keeps_events), IterationTimes()
        self._newest: dict[str, Event] = {}
        self._totals: dict[str, Totals] = defaultdict(Totals)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._losses: deque[tuple[float, RecordedLoss]] = deque(maxlen=_HISTORY)
        self._unrecovered: deque[tuple[float, RecordedLoss]] = deque(maxlen=_HISTORY)
        self._periods: list[tuple[int, float, list[float]]] = []  # workers, start, and times of iterations
        self._validation: dict[str, float] = {}
        self._recent: deque[Event] = deque(maxlen=_RECENT)
        self._end: Event = {}  # of the job; empty once training has begun since
        self._time = 0.0

    def add(self, event: Event) -> None:
        """Adds the next event; raises EventsError, and changes nothing, if the event lacks a necessary field."""
        kind, time = event["type"], event["time"]
        for name in _REQUIRED.get(kind, ()):
            event[name]  # raises before anything has changed
        losses = losses_of(event)
        decided, is_recovery = self._clock.add(event)
        self._times.add(decided, is_recovery)
        self._newest[kind], self._time = event, time
        self._totals[kind].add(event)
        self._counts.update((kind, event[name]) for name in _DISTINGUISHING if isinstance(event.get(name), str))
        if is_recovery:
            self._unrecovered.clear()
        for records in (self._losses, self._unrecovered):
            records.extend((time, loss) for loss in losses)
        self._counts.update(("loss", loss.cause) for loss in losses)
        if kind not in FREQUENT_TYPES:
            self._recent.append(event)
        if kind == "start":
            self._periods.append((event.get("world_size", 1), time, []))
        elif kind == "iteration":
            if not self._periods:
                self._periods.append((1, self._clock.began, []))
            times = self._periods[-1][2]
            times[:] = [time, times[1] + 1] if times else [time, 1]
        elif kind == "evaluation":
            self._validation[event["split"]] = event["loss"]
        if kind in ("start", "exit", "end"):
            self._end = {} if kind == "start" else event

    def snapshot(self) -> RunState:
        """Returns the state after all events that were added."""
        clock, undisturbed_s = self._clock, self._undisturbed_s()
        return RunState(
            iterations=clock.counted,
            history=clock.counted.newest(_HISTORY),
            computed=clock.computed,
            tokens=clock.tokens,
            skipped=clock.skipped,
            iteration_s=undisturbed_s,
            began=clock.began,
            spent=clock.spent(undisturbed_s),
            recoveries=clock.recoveries(undisturbed_s),
            is_recovering=clock.is_recovering,
            newest=dict(self._newest),
            totals=self._totals,
            counts=dict(self._counts),
            losses=tuple(self._losses),
            unrecovered=tuple(self._unrecovered),
            periods=tuple(self._finished_periods()),
            validation=dict(self._validation),
            recent=tuple(self._recent),
            ended=self._end.get("reason"),
            exit_code=self._end.get("code"),
            time=self._time,
        )

    def _undisturbed_s(self) -> float:
        if self._times.median_s is not None:
            return self._times.median_s
        elapsed = [trained.event["elapsed_s"] for trained in self._clock.counted.values()]  # too few to leave some out
        return median(elapsed) if elapsed else 0.0

    def _finished_periods(self) -> Iterable[Period]:
        began = self._clock.began
        for workers, start, times in self._periods:
            if times:
                yield Period(workers, start - began, times[0] - began, int(times[1]))


NO_RUN = RunFold().snapshot()
"""State without events."""


def fold_events(events: Iterable[Event]) -> RunState:
    """Returns the state of a run after all its events."""
    run_fold = RunFold()
    for event in events:
        run_fold.add(event)
    return run_fold.snapshot()
