"""Computes the figures of a run from its events; pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from moc.errors import UserError
from moc.files.event_log import RecordedLoss
from moc.report.run_state import Period, RunState, fold_events
from moc.report.wall_clock import Event, RecoveryTimes, Spent, events_of_type


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


def seconds_by_workers(periods: Sequence[Period]) -> Mapping[int, float]:
    """Returns the seconds of training by number of workers, most workers first."""
    seconds: dict[int, float] = defaultdict(float)
    for period in periods:
        seconds[period.workers] += period.ended_s - period.began_s
    return dict(sorted(seconds.items(), reverse=True))


def summarize_moves(state: RunState) -> Moves | None:
    """Returns the moves of experts; None without moves and fallbacks."""
    migrations, fallbacks = state.of_type("migration"), state.of_type("fallback").count
    if not migrations.count and not fallbacks:
        return None
    return Moves(migrations.count, int(migrations.sum("bytes")), migrations.mean("elapsed_s") or 0.0, fallbacks)


GAUGES = (
    *("mfu", "hhi", "skewness", "plt", "upstream_log_bytes", "upstream_log_iterations"),
    *("sparse_window", "gradient_window", "k_snapshot", "k_persist", "snapshot_interval"),
    *("selective_experts", "selective_copies", "selective_gradients", "mlt", "mlt_peers", "bubble_share"),
    *("storage_age", "storage_overdue", "mlt_storage", "max_violation", "dropped_share"),
)
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
        folded: expert bases with gradients applied in the background.
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
class NoProgress:
    """Generations in a row that lost a worker without progress.

    Attributes:
        iteration: newest iteration that was completed before them; -1 if none was known.
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
        unrecovered: losses without a recovery, each with the time of its event in Unix seconds.
        saving: None if nothing was saved.
        plt_by_layer: PLT of each layer after the newest recovery that lost tokens.
        violation_by_layer: newest maximum violation of the experts in each layer.
        dropped_by_layer: newest share of dropped tokens of each layer.
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
    unrecovered: Sequence[tuple[float, RecordedLoss]]
    saving: Saving | None
    gauges: Mapping[str, Trend]
    plt_by_layer: Mapping[str, float]
    violation_by_layer: Mapping[str, float]
    dropped_by_layer: Mapping[str, float]
    made_up: tuple[int, int] | None
    choices: tuple[TunerChoice, ...]
    standstills: tuple[NoProgress, ...]
    not_written: Mapping[str, int]
    periods: tuple[Period, ...] = ()
    moves: Moves | None = None
    exact: bool | None = None


def compute_report(name: str, events: Sequence[Event]) -> Report:
    """Computes the figures of a run from all its events, in file order.

    Raises:
        ValueError: there is no iteration event, or all events have the same time.
    """
    state = fold_events(events)
    if not state.iterations:
        raise ReportError(
            "there is no iteration in it: nothing has been trained. Fix: give events of a run that has trained",
            code="run-too-short",
        )
    if state.spent.wall_s <= 0:
        raise ReportError(
            "all of its events are of one moment. Fix: give events of a longer run",
            code="run-too-short",
        )
    numbers = sorted(state.iterations)
    in_order = [state.iterations[number].event for number in numbers]
    loads = next((event for event in reversed(in_order) if "max_violation_by_layer" in event), {})
    return Report(
        name=name,
        workers=state.workers,
        first=numbers[0],
        last=numbers[-1],
        iterations=len(numbers),
        skipped=state.skipped,
        computed=state.computed,
        tokens=state.tokens,
        iteration_s=state.iteration_s,
        began=state.began,
        wall_s=state.spent.wall_s,
        ettr=state.ettr,
        tokens_per_s=state.tokens_per_s,
        spent=state.spent,
        loss=_trend(in_order, "loss"),
        validation=state.validation,
        ended=state.ended,
        recoveries=_summarize_recoveries(state),
        each=state.recoveries,
        unrecovered=state.unrecovered,
        saving=_summarize_saving(state),
        gauges={name: trend for name in GAUGES if (trend := _trend(in_order, name)) is not None},
        plt_by_layer=state.newest.get("lost", {}).get("by_layer", {}),
        violation_by_layer=loads.get("max_violation_by_layer", {}),
        dropped_by_layer=loads.get("dropped_share_by_layer", {}),
        made_up=_compensated_tokens(state.newest.get("boost"), in_order[-1]),
        choices=tuple(_choices(events)),
        standstills=list_standstills(events),
        not_written=_count_unwritten(state),
        periods=state.periods,
        moves=summarize_moves(state),
        exact=state.newest.get("start", {}).get("exact"),
    )


def _summarize_recoveries(state: RunState) -> Recoveries:
    recoveries = state.recoveries
    localized = [recovery for recovery in recoveries if recovery.stages]
    failed = [recovery for recovery in recoveries if recovery.exact is False or recovery.lost_tokens > 0]
    return Recoveries(
        count=len(recoveries),
        injected={action: count for (kind, action), count in state.counts.items() if kind == "inject"},
        detect_s=_spread(recovery.detect_s for recovery in recoveries if recovery.detect_s is not None),
        outside_s=_spread(recovery.outside_s for recovery in recoveries),
        kept=_spread(recovery.kept for recovery in recoveries),
        alone=len(localized),
        stages=_spread(len(recovery.stages) for recovery in localized),
        again=_spread(recovery.repeated for recovery in recoveries),
        exact=sum(recovery.exact is True and recovery.lost_tokens <= 0 for recovery in recoveries),
        not_exact=len(failed),
    )


def _summarize_saving(state: RunState) -> Saving | None:
    snapshots, replicated, persisted = (state.of_type(kind) for kind in ("snapshot", "replicate", "persist"))
    if not snapshots.count and not persisted.count:
        return None
    return Saving(
        tier=", ".join(tier for kind, tier in state.counts if kind == "snapshot"),
        snapshots=snapshots.count,
        snapshot_bytes=int(snapshots.sum("bytes")),
        bubble_bytes=int(snapshots.sum("bubble_bytes")),
        copy_s=snapshots.mean("copy_s"),
        hash_s=snapshots.mean("hash_s"),
        stall_s=state.of_type("stall").sum("seconds"),
        replicated=replicated.count,
        replicated_bytes=int(replicated.sum("bytes")),
        not_sent_bytes=int(replicated.sum("not_sent_bytes")),
        replicate_s=replicated.mean("replicate_s"),
        persisted=persisted.count,
        persisted_bytes=int(persisted.sum("bytes")),
        write_s=persisted.mean("write_s"),
        publish_s=persisted.mean("publish_s"),
        restored=state.of_type("restore").count,
        folded=int(state.of_type("fold").sum("folded")),
        survival=state.newest.get("placement", {}).get("survival", {}),
    )


def _compensated_tokens(boost: Event | None, last: Event) -> tuple[int, int] | None:
    if not boost:
        return None
    debt_tokens = last.get("tokens_owed", boost["tokens"]) if boost["boosted"] else boost["tokens"] - boost["made_up"]
    return boost["tokens"] - debt_tokens, boost["tokens"]


def list_standstills(events: Sequence[Event]) -> tuple[NoProgress, ...]:
    """Returns the generations without progress from ``generation`` events; each lists the losses before it."""
    losses = [(event.get("lost_after", -1), event["lost_devices"]) for event in events if "lost_devices" in event]
    newest = [
        (iteration, devices)
        for (iteration, devices), (after, following) in pairwise([*losses, (-2, ())])
        if after != iteration or len(following) <= len(devices)
    ]
    return tuple(
        NoProgress(iteration, len(devices) - 1, tuple(dict.fromkeys((node, device) for node, device in devices)))
        for iteration, devices in newest
        if len(devices) > 1
    )


def _count_unwritten(state: RunState) -> dict[str, int]:
    """Counts failed saves, snapshots skipped because storage was too slow, and logs that could not be written."""
    failed = {destination: count for (kind, destination), count in state.counts.items() if kind == "save_failed"}
    late = {"skipped": state.of_type("save_skipped").count, "log": state.of_type("log_failed").count}
    return failed | {kind: count for kind, count in late.items() if count}


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
