"""What a run was like, in figures, from its events; pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from moc.report.clock import Event, RecoveryTimes, Spent, began, history, of_kind, wall_clock
from moc.simulate.profile import profile_of

GAUGES = (
    *("hhi", "skewness", "plt", "upstream_log_bytes", "upstream_log_iterations"),
    *("sparse_window", "k_snapshot", "k_persist", "snapshot_interval"),
)
_ABOUT_CHOICE = {"type", "time", "iteration", "cause", "reason", "ettr", "mtbf_s"}


@dataclass(frozen=True)
class Spread:
    """Of several values: what is usual, and the most."""

    median: float
    mean: float
    most: float


@dataclass(frozen=True)
class Trend:
    """Of a value over iterations that count."""

    first: float
    last: float
    mean: float
    most: float


@dataclass(frozen=True)
class Saving:
    """What protecting the run took; seconds are means over workers and over what they are about.

    Attributes:
        tier: where snapshots were safe.
        snapshots: that were taken.
        snapshot_bytes: of them all together.
        copy_s: from the device to host memory.
        hash_s: hashing.
        stall_s: that training has waited for snapshots, of all together.
        replicated: snapshots of which all copies were made.
        replicated_bytes: between nodes.
        replicate_s: that a node's copying took.
        persisted: snapshots that were written to storage.
        persisted_bytes: to storage.
        write_s: writing, fsync included.
        publish_s: publishing.
        restored: snapshots of lost nodes that came back from others.
        survival: by number of nodes that are lost at once, how probably their state is left.
    """

    tier: str
    snapshots: int
    snapshot_bytes: int
    copy_s: float | None
    hash_s: float | None
    stall_s: float
    replicated: int
    replicated_bytes: int
    replicate_s: float | None
    persisted: int
    persisted_bytes: int
    write_s: float | None
    publish_s: float | None
    restored: int
    survival: Mapping[str, float]


@dataclass(frozen=True)
class Recoveries:
    """All recoveries together.

    Attributes:
        count: how many there were.
        injected: faults that were injected, by action.
        detect_s: see :class:`RecoveryTimes`.
        outside_s: see :class:`RecoveryTimes`.
        kept: workers that kept their state.
        alone: recoveries in which some stages computed again while others waited.
        stages: how many stages these were.
        again: iterations that were computed again.
        exact: recoveries of which all that was computed again, and could be compared, was as it had been.
        not_exact: something was not, or experts have lost tokens.
    """

    count: int
    injected: Mapping[str, int]
    detect_s: Spread | None
    outside_s: Spread | None
    kept: Spread | None
    alone: int
    stages: Spread | None
    again: Spread | None
    exact: int
    not_exact: int


@dataclass(frozen=True)
class Choice:
    """What a tuner chose.

    Attributes:
        iteration: after which.
        chosen: by name.
        cause: why it looked; None where it always looks.
        reason: why this.
    """

    iteration: int
    chosen: Mapping[str, object]
    cause: str | None
    reason: str


@dataclass(frozen=True)
class Report:
    """What a run was like.

    Attributes:
        name: of the run.
        workers: at the end.
        first: iteration that counts.
        last: iteration that counts.
        iterations: that count, each once.
        skipped: of them, in which nothing was updated.
        computed: iterations, with those that were computed again in training.
        tokens: that were trained on.
        iteration_s: of an iteration that nothing disturbs; the median.
        began: Unix seconds.
        wall_s: of the job, without the time between an orderly end and the next start.
        ettr: useful work, as a share of the wall clock.
        tokens_per_s: by the wall clock.
        spent: where the wall clock went.
        loss: training loss.
        validation: the newest, by split.
        ended: why the run ended; None if it did not in good order.
        recoveries: all together.
        each: recovery.
        saving: what it took; None where nothing was saved.
        gauges: what changed over time.
        plt_by_layer: after the newest recovery that lost tokens.
        choices: of tuners.
        not_written: by what could not be, or not in time, how often.
    """

    name: str
    workers: int
    first: int
    last: int
    iterations: int
    skipped: int
    computed: int
    tokens: int
    iteration_s: float
    began: float
    wall_s: float
    ettr: float
    tokens_per_s: float
    spent: Spent
    loss: Trend | None
    validation: Mapping[str, float]
    ended: str | None
    recoveries: Recoveries
    each: tuple[RecoveryTimes, ...]
    saving: Saving | None
    gauges: Mapping[str, Trend]
    plt_by_layer: Mapping[str, float]
    choices: tuple[Choice, ...]
    not_written: Mapping[str, int]


def report(name: str, events: Sequence[Event]) -> Report:
    """What a run was like.

    Args:
        name: of the run.
        events: all of them, as they were written.

    Raises:
        ValueError: there is no iteration among them.
    """
    counted, _ = history(events)
    if not counted:
        raise ValueError("there is no iteration in it: nothing has been trained.")
    usual_s = _usual_s(events, counted)
    spent, each = wall_clock(events, usual_s)
    in_order = [counted[number] for number in sorted(counted)]
    tokens = sum(event["tokens"] for event in in_order)
    ended = [event for event in events if event["type"] in ("start", "exit")][-1:]
    lost = _newest(events, "lost")
    return Report(
        name=name,
        workers=_newest(events, "start").get("world_size", 1),
        first=min(counted),
        last=max(counted),
        iterations=len(counted),
        skipped=sum(bool(event.get("skipped")) for event in in_order),
        computed=sum(event["type"] == "iteration" for event in events),
        tokens=tokens,
        iteration_s=usual_s,
        began=began(events),
        wall_s=spent.wall_s,
        ettr=spent.useful_s / spent.wall_s,
        tokens_per_s=tokens / spent.wall_s,
        spent=spent,
        loss=_trend(in_order, "loss"),
        validation={event["split"]: event["loss"] for event in events if event["type"] == "evaluation"},
        ended=ended[0].get("reason") if ended else None,
        recoveries=_together(events, each),
        each=each,
        saving=_saving(events),
        gauges={name: trend for name in GAUGES if (trend := _trend(in_order, name)) is not None},
        plt_by_layer=lost.get("by_layer", {}),
        choices=tuple(_choices(events)),
        not_written=_not_written(events),
    )


def _usual_s(events: Sequence[Event], counted: Mapping[int, Event]) -> float:
    try:
        return profile_of(events).iteration_s
    except ValueError:  # a short run: its first iterations have to do
        return median(event["elapsed_s"] for event in counted.values())


def _together(events: Sequence[Event], each: Sequence[RecoveryTimes]) -> Recoveries:
    alone = [one for one in each if one.stages]
    failed = [one for one in each if one.exact is False or one.lost_tokens > 0]
    return Recoveries(
        count=len(each),
        injected=dict(Counter(event["action"] for event in of_kind("inject", events))),
        detect_s=_spread(one.detect_s for one in each if one.detect_s is not None),
        outside_s=_spread(one.outside_s for one in each),
        kept=_spread(one.kept for one in each),
        alone=len(alone),
        stages=_spread(len(one.stages) for one in alone),
        again=_spread(one.again for one in each),
        exact=sum(one.exact is True and one not in failed for one in each),
        not_exact=len(failed),
    )


def _saving(events: Sequence[Event]) -> Saving | None:
    snapshots, replicated, persisted = (of_kind(kind, events) for kind in ("snapshot", "replicate", "persist"))
    if not snapshots and not persisted:
        return None
    return Saving(
        tier=", ".join(dict.fromkeys(event["tier"] for event in snapshots)),
        snapshots=len(snapshots),
        snapshot_bytes=int(_sum(snapshots, "bytes")),
        copy_s=_mean(snapshots, "copy_s"),
        hash_s=_mean(snapshots, "hash_s"),
        stall_s=_sum(of_kind("stall", events), "seconds"),
        replicated=len(replicated),
        replicated_bytes=int(_sum(replicated, "bytes")),
        replicate_s=_mean(replicated, "replicate_s"),
        persisted=len(persisted),
        persisted_bytes=int(_sum(persisted, "bytes")),
        write_s=_mean(persisted, "write_s"),
        publish_s=_mean(persisted, "publish_s"),
        restored=len(of_kind("restore", events)),
        survival=_newest(events, "placement").get("survival", {}),
    )


def _not_written(events: Sequence[Event]) -> dict[str, int]:
    """Saves that failed, snapshots for which storage was too slow, and times for which logs could not be written."""
    told = [event["what"] for event in of_kind("save_failed", events)]
    told += ["skipped"] * len(of_kind("save_skipped", events))
    told += ["log"] * len(of_kind("log_failed", events))
    return dict(Counter(told))


def _choices(events: Sequence[Event]) -> Iterable[Choice]:
    for event in of_kind("choice", events):
        chosen = {name: value for name, value in event.items() if name not in _ABOUT_CHOICE}
        yield Choice(event["iteration"], chosen, event.get("cause"), event["reason"])


def _trend(iterations: Sequence[Event], name: str) -> Trend | None:
    values = [value for event in iterations if (value := event.get(name)) is not None]
    return Trend(values[0], values[-1], fmean(values), max(values)) if values else None


def _spread(values: Iterable[float]) -> Spread | None:
    values = list(values)
    return Spread(median(values), fmean(values), max(values)) if values else None


def _newest(events: Sequence[Event], kind: str) -> Event:
    return next((event for event in reversed(events) if event["type"] == kind), {})


def _sum(events: Sequence[Event], name: str) -> float:
    return sum(event[name] for event in events)


def _mean(events: Sequence[Event], name: str) -> float | None:
    return fmean(event[name] for event in events) if events else None
