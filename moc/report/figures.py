"""Computes the figures of a run from its events; pure functions."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from moc.errors import UserError
from moc.report.wall_clock import (
    Event,
    RecoveryTimes,
    Spent,
    account_wall_clock,
    counted_iterations,
    events_of_type,
    run_start,
)
from moc.simulate.profile import profile_of


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


def list_periods(events: Sequence[Event], run_start: float) -> tuple[Period, ...]:
    """Returns the periods of a run in order, without periods that have no iteration.

    Args:
        events: events of the run, in file order.
        run_start: start of the run, in Unix seconds.
    """
    periods: list[Period] = []
    workers, start, times = 1, run_start, list[float]()
    for event in (*events, None):
        kind = "start" if event is None else event["type"]
        if kind == "start":
            if times:
                periods.append(Period(workers, start - run_start, times[-1] - run_start, len(times)))
            times = []
        if event is not None and kind == "start":
            workers, start = event.get("world_size", 1), event["time"]
        elif event is not None and kind == "iteration":
            times.append(event["time"])
    return tuple(periods)


def seconds_by_workers(periods: Sequence[Period]) -> Mapping[int, float]:
    """Returns the seconds of training by number of workers, most workers first."""
    seconds: dict[int, float] = defaultdict(float)
    for period in periods:
        seconds[period.workers] += period.ended_s - period.began_s
    return dict(sorted(seconds.items(), reverse=True))


def summarize_moves(events: Sequence[Event]) -> Moves | None:
    """Returns the moves of experts; None without moves and fallbacks."""
    migrations, fallbacks = events_of_type("migration", events), events_of_type("fallback", events)
    if not migrations and not fallbacks:
        return None
    seconds = [event["elapsed_s"] for event in migrations]
    amount = sum(event["bytes"] for event in migrations)
    return Moves(len(migrations), amount, sum(seconds) / len(seconds) if seconds else 0.0, len(fallbacks))


GAUGES = (
    *("hhi", "skewness", "plt", "upstream_log_bytes", "upstream_log_iterations"),
    *("sparse_window", "gradient_window", "k_snapshot", "k_persist", "snapshot_interval"),
    *("selective_experts", "selective_copies", "selective_gradients", "mlt", "mlt_peers", "bubble_share"),
    *("storage_age", "storage_overdue", "mlt_storage", "max_violation", "dropped_share"),
)
_LOADS = "max_violation_by_layer"
_CHOICE_METADATA = {"type", "time", "iteration", "cause", "reason", "ettr", "mtbf_s"}


class ReportError(UserError, ValueError):
    """Unusable events for a report; the message names the cause and the remedy."""


@dataclass(frozen=True)
class Spread:
    """Median, mean and maximum of several values."""

    median: float
    mean: float
    most: float


@dataclass(frozen=True)
class Trend:
    """Value over the iterations that count."""

    first: float
    last: float
    mean: float
    most: float


@dataclass(frozen=True)
class Saving:
    """Cost of snapshots; seconds are means over workers and snapshots, unless noted.

    Attributes:
        tier: tiers of the snapshots.
        snapshot_bytes: bytes of all snapshots.
        bubble_bytes: bytes of snapshots copied in the pipeline's bubbles.
        copy_s: from the device to host memory.
        stall_s: total time that training waited for snapshots.
        replicated: snapshots with all copies made.
        replicated_bytes: bytes sent between nodes.
        not_sent_bytes: further bytes of copies, not sent because their nodes already store identical bytes.
        replicate_s: copying by a node.
        persisted: snapshots written to storage.
        persisted_bytes: bytes written to storage.
        write_s: writing, including fsync.
        restored: snapshots of lost nodes restored from replicas.
        folded: expert bases to which gradients were applied in the background.
        survival: by number of nodes lost together, the probability that their state survives.
    """

    tier: str
    snapshots: int
    snapshot_bytes: int
    bubble_bytes: int
    copy_s: float | None
    hash_s: float | None
    stall_s: float
    replicated: int
    replicated_bytes: int
    not_sent_bytes: int
    replicate_s: float | None
    persisted: int
    persisted_bytes: int
    write_s: float | None
    publish_s: float | None
    restored: int
    folded: int
    survival: Mapping[str, float]


@dataclass(frozen=True)
class Recoveries:
    """Summary of all recoveries (:class:`RecoveryTimes`).

    Attributes:
        injected: injected faults, by action.
        kept: workers that kept their state.
        alone: recoveries with stages that replayed while others waited.
        stages: number of these stages.
        again: iterations computed again.
        exact: recoveries that reproduced every repeated iteration that could be compared.
        not_exact: recoveries with a difference or with lost tokens of experts.
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
class Standstill:
    """Generations in a row that lost a worker without progress.

    Attributes:
        iteration: newest iteration that was completed before them.
        generations: their number; the loss that ended the iteration's own generation does not count.
        devices: node and device of the lost workers, each once.
    """

    iteration: int
    generations: int
    devices: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TunerChoice:
    """Tuner's choice after an iteration, with the cause of the review (None if it always reviews) and the reason."""

    iteration: int
    chosen: Mapping[str, object]
    cause: str | None
    reason: str


@dataclass(frozen=True)
class Report:
    """Figures of a run.

    Attributes:
        workers: workers at the end.
        exact: whether recovery restores the same bits; None if the events lack it.
        first: first iteration that counts.
        last: last iteration that counts.
        iterations: iterations that count, each once.
        skipped: counted iterations without an update.
        computed: iterations computed in training, including repeated ones.
        iteration_s: median seconds of an undisturbed iteration.
        began: start of the run, in Unix seconds.
        wall_s: duration of the job, without the time between an orderly exit and the next start.
        ettr: effective training time ratio.
        tokens_per_s: by the wall clock.
        validation: the newest validation loss, by split.
        ended: why the run ended; None without an orderly exit.
        saving: None if nothing was saved.
        plt_by_layer: PLT of each layer after the newest recovery that lost tokens.
        violation_by_layer: newest maximum violation of the experts in each layer.
        made_up: tokens compensated by more capacity, and tokens to compensate since the newest recovery; None without.
        choices: choices of tuners.
        standstills: generations without progress, in order.
        not_written: number of failed or late writes, by kind.
        periods: periods of training, with the number of workers in each.
        moves: moves of experts after membership changes; None without.
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
    violation_by_layer: Mapping[str, float]
    made_up: tuple[int, int] | None
    choices: tuple[TunerChoice, ...]
    standstills: tuple[Standstill, ...]
    not_written: Mapping[str, int]
    periods: tuple[Period, ...] = ()
    moves: Moves | None = None
    exact: bool | None = None


def compute_report(name: str, events: Sequence[Event]) -> Report:
    """Computes the figures of a run from all its events, in file order.

    Raises:
        ValueError: there is no iteration event, or all events have the same time.
    """
    counted, _ = counted_iterations(events)
    if not counted:
        raise ReportError(
            "there is no iteration in it: nothing has been trained. Fix: give events of a run that has trained",
            code="run-too-short",
        )
    undisturbed_s = _undisturbed_s(events, counted)
    spent, recoveries = account_wall_clock(events, undisturbed_s)
    if spent.wall_s <= 0:
        raise ReportError(
            "all of its events are of one moment. Fix: give events of a longer run",
            code="run-too-short",
        )
    in_order = [counted[number] for number in sorted(counted)]
    tokens = sum(event["tokens"] for event in in_order)
    last_starts_and_exits = [event for event in events if event["type"] in ("start", "exit")][-1:]
    newest_loss = _newest_event(events, "lost")
    return Report(
        name=name,
        workers=_newest_event(events, "start").get("world_size", 1),
        first=min(counted),
        last=max(counted),
        iterations=len(counted),
        skipped=sum(bool(event.get("skipped")) for event in in_order),
        computed=sum(event["type"] == "iteration" for event in events),
        tokens=tokens,
        iteration_s=undisturbed_s,
        began=run_start(events),
        wall_s=spent.wall_s,
        ettr=spent.useful_s / spent.wall_s,
        tokens_per_s=tokens / spent.wall_s,
        spent=spent,
        loss=_trend(in_order, "loss"),
        validation={event["split"]: event["loss"] for event in events if event["type"] == "evaluation"},
        ended=last_starts_and_exits[0].get("reason") if last_starts_and_exits else None,
        recoveries=_summarize_recoveries(events, recoveries),
        each=recoveries,
        saving=_summarize_saving(events),
        gauges={name: trend for name in GAUGES if (trend := _trend(in_order, name)) is not None},
        plt_by_layer=newest_loss.get("by_layer", {}),
        violation_by_layer=next((e[_LOADS] for e in reversed(in_order) if _LOADS in e), {}),
        made_up=_compensated_tokens(events, in_order[-1]),
        choices=tuple(_choices(events)),
        standstills=list_standstills(events),
        not_written=_count_unwritten(events),
        periods=list_periods(events, run_start(events)),
        moves=summarize_moves(events),
        exact=_newest_event(events, "start").get("exact"),
    )


def _undisturbed_s(events: Sequence[Event], counted: Mapping[int, Event]) -> float:
    try:
        return profile_of(events).iteration_s
    except ValueError:  # the run is too short to leave out its first iterations
        return median(event["elapsed_s"] for event in counted.values())


def _summarize_recoveries(events: Sequence[Event], recoveries: Sequence[RecoveryTimes]) -> Recoveries:
    localized = [recovery for recovery in recoveries if recovery.stages]
    failed = [one for one in recoveries if one.exact is False or one.lost_tokens > 0]
    return Recoveries(
        count=len(recoveries),
        injected=dict(Counter(event["action"] for event in events_of_type("inject", events))),
        detect_s=_spread(one.detect_s for one in recoveries if one.detect_s is not None),
        outside_s=_spread(one.outside_s for one in recoveries),
        kept=_spread(one.kept for one in recoveries),
        alone=len(localized),
        stages=_spread(len(one.stages) for one in localized),
        again=_spread(one.again for one in recoveries),
        exact=sum(one.exact is True and one.lost_tokens <= 0 for one in recoveries),
        not_exact=len(failed),
    )


def _summarize_saving(events: Sequence[Event]) -> Saving | None:
    snapshots, replicated, persisted = (events_of_type(kind, events) for kind in ("snapshot", "replicate", "persist"))
    if not snapshots and not persisted:
        return None
    return Saving(
        tier=", ".join(dict.fromkeys(event["tier"] for event in snapshots)),
        snapshots=len(snapshots),
        snapshot_bytes=int(_sum(snapshots, "bytes")),
        bubble_bytes=sum(event.get("bubble_bytes", 0) for event in snapshots),
        copy_s=_mean(snapshots, "copy_s"),
        hash_s=_mean(snapshots, "hash_s"),
        stall_s=_sum(events_of_type("stall", events), "seconds"),
        replicated=len(replicated),
        replicated_bytes=int(_sum(replicated, "bytes")),
        not_sent_bytes=sum(event.get("not_sent_bytes", 0) for event in replicated),
        replicate_s=_mean(replicated, "replicate_s"),
        persisted=len(persisted),
        persisted_bytes=int(_sum(persisted, "bytes")),
        write_s=_mean(persisted, "write_s"),
        publish_s=_mean(persisted, "publish_s"),
        restored=len(events_of_type("restore", events)),
        folded=int(_sum(events_of_type("fold", events), "folded")),
        survival=_newest_event(events, "placement").get("survival", {}),
    )


def _compensated_tokens(events: Sequence[Event], last: Event) -> tuple[int, int] | None:
    boost = _newest_event(events, "boost")
    if not boost:
        return None
    owed_tokens = last.get("tokens_owed", boost["tokens"]) if boost["boosted"] else boost["tokens"] - boost["made_up"]
    return boost["tokens"] - owed_tokens, boost["tokens"]


def list_standstills(events: Sequence[Event]) -> tuple[Standstill, ...]:
    """Returns the generations without progress from ``generation`` events; each lists the losses before it."""
    losses = [(event["lost_after"], event["lost_devices"]) for event in events if "lost_after" in event]
    newest = [
        (iteration, devices)
        for (iteration, devices), (after, following) in pairwise([*losses, (-1, ())])
        if after != iteration or len(following) <= len(devices)
    ]
    return tuple(
        Standstill(iteration, len(devices) - 1, tuple(dict.fromkeys((node, device) for node, device in devices)))
        for iteration, devices in newest
        if len(devices) > 1
    )


def _count_unwritten(events: Sequence[Event]) -> dict[str, int]:
    """Counts failed saves, snapshots skipped because storage was too slow, and logs that could not be written."""
    kinds = [event["what"] for event in events_of_type("save_failed", events)]
    kinds += ["skipped"] * len(events_of_type("save_skipped", events))
    kinds += ["log"] * len(events_of_type("log_failed", events))
    return dict(Counter(kinds))


def _choices(events: Sequence[Event]) -> Iterable[TunerChoice]:
    for event in events_of_type("choice", events):
        chosen = {name: value for name, value in event.items() if name not in _CHOICE_METADATA}
        yield TunerChoice(event["iteration"], chosen, event.get("cause"), event["reason"])


def _trend(iterations: Sequence[Event], name: str) -> Trend | None:
    values = [value for event in iterations if (value := event.get(name)) is not None]
    return Trend(values[0], values[-1], fmean(values), max(values)) if values else None


def _spread(values: Iterable[float]) -> Spread | None:
    values = list(values)
    return Spread(median(values), fmean(values), max(values)) if values else None


def _newest_event(events: Sequence[Event], kind: str) -> Event:
    return next((event for event in reversed(events) if event["type"] == kind), {})


def _sum(events: Sequence[Event], name: str) -> float:
    return sum(event[name] for event in events)


def _mean(events: Sequence[Event], name: str) -> float | None:
    return fmean(event[name] for event in events) if events else None
