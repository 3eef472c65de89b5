"""Prints reports of runs: a table with a column for each run, and a picture."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moc.cli_output import Parser, console, counted, escapes_output, human, print_lines, refused, replacing
from moc.errors import code_of
from moc.files.event_log import RecordedLoss, events_file, read_events
from moc.files.safe_directory import SafeDirectory
from moc.plots import THEMES, theme_path
from moc.report.figures import Report, ReportError, Saving, Spread, Trend, compute_report, seconds_by_workers
from moc.report.pictures import PART_TITLES, Section, draw_report, write_html
from moc.report.wall_clock import PHASES, Event, RecoveryTimes

_MAX_PICTURE_BYTES = 64 << 20
_SETTINGS = {
    "sparse_window": "window W",
    "gradient_window": "window W of gradients",
    "k_snapshot": "K in memory",
    "k_persist": "K in storage",
    "snapshot_interval": "interval",
}
_WIDE = 160  # columns without a terminal

Cell = Callable[[Report], "str | None"]


def print_reports(runs: Sequence[Report]) -> None:
    """Prints a table with a column for each run, and the choices of tuners."""
    console(width=_WIDE).print(_table(runs))
    for run in runs:
        if run.each or run.unrecovered:
            console(width=_WIDE).print(_incidents(run))
        print_lines(*choice_lines(run, f"{run.name}: " if len(runs) > 1 else ""))


def table_sections(runs: Sequence[Report]) -> Iterable[tuple[str, list[tuple[str, list[str]]]]]:
    """Yields sections of lines, each with a cell for each run; leaves out lines without any value."""
    for section, lines in _SECTIONS.items():
        cells_by_title = ((name, [cell(run) for run in runs]) for name, cell in lines.items())
        filled = [(name, [cell or "" for cell in cells]) for name, cells in cells_by_title if any(cells)]
        if filled:
            yield section, filled


def _table(runs: Sequence[Report]):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right", overflow="fold")
    for section, lines in table_sections(runs):
        table.add_row(section.upper())
        for name, cells in lines:
            table.add_row(f"  {name}", *cells)
        table.add_section()
    return table


INCIDENT_TITLES = ("time", "iteration", "worker", "node", "cause", *PHASES, "outside useful work", "repeated")
"""Titles of the columns of :func:`incident_rows`."""


def incident_rows(
    recoveries: Iterable[RecoveryTimes], unrecovered: Iterable[tuple[float, RecordedLoss]], last: int
) -> list[list[str]]:
    """Returns the cells of each loss in a list of incidents, the oldest first; empty ones are unknown.

    The first row of a recovery has its seconds, and the iterations that it repeated.

    Args:
        recoveries: finished recoveries.
        unrecovered: later losses, each with the time of its event in Unix seconds.
        last: the newest iteration.
    """
    rows = [row for recovery in recoveries for row in _recovery_rows(recovery)]
    costs = [""] * len(PHASES) + ["not recovered", ""]
    return rows + [[_local_time(at), f"{last:,}", *_loss_cells(loss), *costs] for at, loss in unrecovered]


def _recovery_rows(recovery: RecoveryTimes) -> Iterable[list[str]]:
    time_and_iteration = [_local_time(recovery.time), f"{recovery.newest:,}"]
    costs = [
        *(seconds(recovery.phases.get(phase)) or "" for phase in PHASES),
        seconds(recovery.outside_s) or "",
        f"{recovery.repeated:,}",
    ]
    for loss in recovery.losses or (RecordedLoss(),):
        yield [*time_and_iteration, *_loss_cells(loss), *costs]
        costs = [""] * len(costs)


def _local_time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


_RESTART, _NOT_ENDED = "job restarted", "not in good order, or not yet"


def _loss_cells(loss: RecordedLoss) -> list[str]:
    killed = "" if loss.signal is None else f", signal {loss.signal}"
    rank_and_node = ["" if number is None else str(number) for number in (loss.rank, loss.node)]
    return [*rank_and_node, f"{loss.cause or _RESTART}{killed}"]


def _incidents(run: Report):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=f"Incidents of {run.name}", title_justify="left")
    for title in INCIDENT_TITLES:
        table.add_column(title, justify="left" if title in ("time", "cause") else "right", overflow="fold")
    for row in incident_rows(run.each, run.unrecovered, run.last):
        table.add_row(*row)
    return table


def choice_lines(run: Report, prefix: str = "") -> Iterable[str]:
    """Yields the lines about the choices of tuners."""
    for choice in run.choices:
        chosen = ", ".join(f"{name} {value}" for name, value in choice.chosen.items())
        yield f"{prefix}at iteration {choice.iteration}: {chosen}"
        yield f"    {choice.reason}" + (f" (It looked since {choice.cause}.)" if choice.cause else "")


def seconds(value: float | None) -> str | None:
    """Returns a readable time; None for None."""
    if value is None:
        return None
    if abs(value) >= 3600:
        return f"{value / 3600:.2f} h"
    return f"{value:.2f} s" if abs(value) >= 0.9995 else f"{value * 1000:.3g} ms"


def _figure(value: float) -> str:
    """Returns three significant digits, or all digits of a large number without decimals."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def _percent(share: float, digits: int = 2) -> str:
    return f"{100 * share:.{digits}f} %"


def _part(name: str) -> Cell:
    def cell(run: Report) -> str | None:
        spent = getattr(run.spent, name)
        return f"{seconds(spent)}, {_percent(spent / run.wall_s, 1):>6}" if spent else None

    return cell


def _spread(spread: Spread | None, text: Callable[[float], str | None]) -> str | None:
    """Returns median and maximum as text."""
    return spread and f"{text(spread.median)}, {text(spread.most)}"


def _by_workers(run: Report) -> str | None:
    """Returns seconds and share by number of workers, if the number has changed."""
    seconds_by_count = seconds_by_workers(run.periods)
    trained_s = sum(seconds_by_count.values())
    parts = (
        f"{workers}: {seconds(time)}, {_percent(time / trained_s, 1)}" for workers, time in seconds_by_count.items()
    )
    return "\n".join(parts) if len(seconds_by_count) > 1 else None


def _moves(run: Report) -> str | None:
    moved = run.moves
    return (
        f"{moved.count:,} of {human(moved.bytes / moved.count)} in {seconds(moved.seconds)}"
        if moved and moved.count
        else None
    )


def _mean_and_most(spread: Spread | None) -> str | None:
    return spread and f"{_figure(spread.mean)}, {_figure(spread.most)}"


def _gauge(name: str, text: Callable[[Trend], str]) -> Cell:
    return lambda run: text(run.gauges[name]) if name in run.gauges else None


def _trend(name: str, text: Callable[[float], str]) -> Cell:
    return _gauge(name, lambda trend: f"{text(trend.first)}, {text(trend.last)}, {text(trend.mean)}")


def _highest(name: str, text: Callable[[float], str]) -> Cell:
    return _gauge(name, lambda trend: f"{text(trend.mean)}, {text(trend.most)}")


def _share(part: str, total: str) -> Cell:
    """Returns a cell with the share of one gauge in another, by their means."""

    def cell(run: Report) -> str | None:
        if part not in run.gauges or not (base := run.gauges.get(total)) or not base.mean:
            return None
        return _percent(run.gauges[part].mean / base.mean, 1)

    return cell


def _setting(trend: Trend) -> str:
    return f"{trend.last:g}" if trend.first == trend.last else f"{trend.first:g}, then {trend.last:g}"


def _saved(text: Callable[[Saving], str | None], if_any: str = "snapshots") -> Cell:
    return lambda run: text(run.saving) if run.saving and getattr(run.saving, if_any) else None


def _iterations(run: Report) -> str:
    skipped = f", {run.skipped:,} skipped" if run.skipped else ""
    return f"{run.iterations:,} ({run.first:,} to {run.last:,}){skipped}"


def _join_counts(counts: Mapping[str, Any], text: Callable[[Any], str], between: str = " ") -> str:
    return ", ".join(f"{name}{between}{text(value)}" for name, value in counts.items())


def _exact(run: Report) -> str | None:
    recoveries = run.recoveries
    parts = [f"{recoveries.exact} exact"] * bool(recoveries.exact)
    parts += [f"{recoveries.not_exact} not"] * bool(recoveries.not_exact)
    not_compared = recoveries.count - recoveries.exact - recoveries.not_exact
    return ", ".join([*parts, f"{not_compared} not compared"] if not_compared and parts else parts) or None


def _standstills(run: Report) -> str | None:
    lines = (
        f"{stop.generations} {'before training' if stop.iteration < 0 else f'after iteration {stop.iteration:,}'}: "
        + ", ".join(f"device {device} of node {node}" for node, device in stop.devices)
        for stop in run.standstills
    )
    return "\n".join(lines) or None


def _localized_recoveries(run: Report) -> str | None:
    recoveries = run.recoveries
    return recoveries.stages and f"{_mean_and_most(recoveries.stages)}; in {recoveries.alone} of {recoveries.count}"


def _per_iteration(total: str) -> Cell:
    def cell(run: Report) -> str | None:
        nbytes = getattr(run.saving, total, 0)
        return human(nbytes / run.computed) if nbytes else None

    return cell


def _not_written(kind: str) -> Cell:
    return lambda run: f"{run.not_written[kind]:,}" if run.not_written.get(kind) else None


def _worst_layers(run: Report) -> str | None:
    lost = sorted(run.plt_by_layer.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{_percent(plt)} in layer {layer}" for layer, plt in lost if plt) or None


def _highest_layers(values: Mapping[str, float], text: Callable[[float], str]) -> str | None:
    layers = sorted(values.items(), key=lambda item: -item[1])[:8]
    return ", ".join(f"{layer}: {text(value)}" for layer, value in layers) or None


_SECTIONS: dict[str, dict[str, Cell]] = {
    "run": {
        "workers": lambda run: f"{run.workers:,}",
        "iterations": _iterations,
        "wall clock": lambda run: seconds(run.wall_s),
        "an iteration, undisturbed": lambda run: seconds(run.iteration_s),
        "tokens": lambda run: f"{run.tokens:,}" if run.tokens else None,
        "tokens/s, by the wall clock": lambda run: f"{run.tokens_per_s:,.0f}" if run.tokens else None,
        "tokens/s, undisturbed": lambda run: (
            f"{run.tokens / run.iterations / run.iteration_s:,.0f}" if run.tokens and run.iteration_s > 0 else None
        ),
        "loss: first, last": lambda run: run.loss and f"{run.loss.first:.4f}, {run.loss.last:.4f}",
        "loss, newest": lambda run: _join_counts(run.validation, "{:.4f}".format),
        "recovery is exact": lambda run: None if run.exact is None else "yes" if run.exact else "no",
        "ended": lambda run: run.ended or _NOT_ENDED,
    },
    "where the time went": {
        "ETTR": lambda run: f"{run.ettr:.3f}",
        **{title: _part(name) for name, title in PART_TITLES.items()},
    },
    "members": {
        "trained on so many workers": _by_workers,
        "moves of experts, when they changed": _moves,
        "checkpoints read, since experts were lost": lambda run: f"{run.moves.fallbacks:,}" if run.moves else None,
    },
    "faults and recoveries": {
        "injected": lambda run: _join_counts(run.recoveries.injected, str),
        "recoveries": lambda run: f"{run.recoveries.count:,}" if run.recoveries.count else None,
        "until stopped: median, worst": lambda run: _spread(run.recoveries.detect_s, seconds),
        "outside useful work: median, worst": lambda run: _spread(run.recoveries.outside_s, seconds),
        "workers that kept their state: mean, most": lambda run: _mean_and_most(run.recoveries.kept),
        "stages replayed without others: mean, most": _localized_recoveries,
        "iterations computed again: mean, most": lambda run: _mean_and_most(run.recoveries.again),
        "losses computed again": _exact,
        "generations without progress": _standstills,
    },
    "snapshots": {
        "tier": _saved(lambda saving: saving.tier),
        "taken": _saved(lambda saving: f"{saving.snapshots:,}"),
        "bytes of one": _saved(lambda saving: human(saving.snapshot_bytes / saving.snapshots)),
        "bytes an iteration, to host memory": _per_iteration("snapshot_bytes"),
        "bytes an iteration, to peers": _per_iteration("replicated_bytes"),
        "not sent, identical on the peers": _per_iteration("not_sent_bytes"),
        "bytes an iteration, to storage": _per_iteration("persisted_bytes"),
        "experts of each layer (S): mean, most": _highest("selective_experts", _figure),
        "of these, copied to other nodes: mean, most": _highest("selective_copies", _figure),
        "of these, saved as gradients": _share("selective_gradients", "selective_experts"),
        "bases updated in the background": _saved(lambda saving: f"{saving.folded:,}", "folded"),
        "copied in bubbles": _saved(
            lambda saving: _percent(saving.bubble_bytes / saving.snapshot_bytes, 1), "bubble_bytes"
        ),
        "copy, hash": _saved(lambda saving: f"{seconds(saving.copy_s)}, {seconds(saving.hash_s)}"),
        "stall of an iteration": lambda run: (
            seconds(run.saving.stall_s / run.computed) if run.saving and run.saving.snapshots else None
        ),
        "replicated": _saved(
            lambda saving: f"{saving.replicated:,} in {seconds(saving.replicate_s)} each", "replicated"
        ),
        "written and published": _saved(
            lambda saving: f"{saving.persisted:,} in {seconds((saving.write_s or 0) + (saving.publish_s or 0))} each",
            "persisted",
        ),
        "of lost nodes, from others": _saved(lambda saving: f"{saving.restored:,}", "restored"),
        "survival, by number of lost nodes": _saved(
            lambda saving: _join_counts(saving.survival, lambda share: f"{100 * share:.3g} %", ": "), "survival"
        ),
    },
    "could not be written": {
        "snapshots": _not_written("snapshot"),
        "snapshots, storage being too slow": _not_written("skipped"),
        "checkpoints": _not_written("checkpoint"),
        "logs, for a while": _not_written("log"),
    },
    "missing from storage": {
        "iterations: mean, most": _highest("storage_age", _figure),
        "operators older than promised: mean, most": _highest("storage_overdue", _figure),
    },
    "upstream logs": {
        "bytes: mean, most": _highest("upstream_log_bytes", human),
        "iterations: mean, most": _highest("upstream_log_iterations", _figure),
    },
    "experts": {
        "maximum violation: first, last, mean": _trend("max_violation", _figure),
        "highest layers at the end": lambda run: _highest_layers(run.violation_by_layer, _figure),
        "dropped tokens: mean, most": _highest("dropped_share", _percent),
        "layers that drop most at the end": lambda run: _highest_layers(
            {layer: share for layer, share in run.dropped_by_layer.items() if share}, _percent
        ),
        "HHI: first, last, mean": _trend("hhi", "{:.4f}".format),
        "skewness: first, last, mean": _trend("skewness", "{:.4f}".format),
        "tokens lost (PLT): first, last, mean": _trend("plt", _percent),
        "most of them": _worst_layers,
        "at risk (MLT), in iterations: mean, most": _highest("mlt", _figure),
        "at risk with a node's memory: mean, most": _highest("mlt_peers", _figure),
        "at risk with all memory: mean, most": _highest("mlt_storage", _figure),
        "of the newest, made up by more capacity": lambda run: run.made_up and "{:,} of {:,}".format(*run.made_up),
    },
    "policy": {title: _gauge(name, _setting) for name, title in _SETTINGS.items()},
}


def _write_html(path: str, runs: Sequence[Report], events: Sequence[Sequence[Event]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        draw_report(f"{directory}/report.png", runs, events)
        names = [theme_path("report.png", theme).name for theme in THEMES]
        light, dark = (SafeDirectory(directory).read(name, _MAX_PICTURE_BYTES) for name in names)
    names = [run.name for run in runs]
    sections: list[Section] = []
    for run in runs:
        rows = incident_rows(run.each, run.unrecovered, run.last)
        sections.append((f"Incidents of {run.name}", INCIDENT_TITLES, rows))
    for title, lines in table_sections(runs):
        sections.append((title.capitalize(), ("", *names), [[name, *cells] for name, cells in lines]))
    for run in runs:
        sections.append((f"Choices of {run.name}", (), ([line] for line in choice_lines(run))))
    lead = [f"{run.name}: {_outcome(run)}" for run in runs]
    write_html(path, f"Report of {', '.join(names)}", lead, light, dark, sections)


def _outcome(run: Report) -> str:
    """Returns a sentence with the iterations, losses and end of a run."""
    lost = sum(len(recovery.losses) for recovery in run.each) + len(run.unrecovered)
    progress = f"iteration {run.last:,}, ETTR {run.ettr:.3f}, {counted(lost, 'incident')}"
    fatal = f", {len(run.unrecovered):,} of them not recovered" if run.unrecovered else ""
    return f"{progress}{fatal}. Ended: {run.ended or _NOT_ENDED}"


EPILOG = """\
examples:
  python tools/report.py log/
  python tools/report.py full/log sparse/log --plot report.png --json report.json

ETTR is the share of useful work in the wall clock: committed iterations, each at the median duration of undisturbed
ones. The lines below it are the parts of the wall clock; docs/how-to/read-a-run.md explains them."""


def build_parser() -> argparse.ArgumentParser:
    """Builds the command line parser."""
    parser = Parser(
        description="Summarize runs: time, faults and recoveries, snapshots, experts, choices.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("events", nargs="+", metavar="EVENTS", help="events.jsonl files, or directories with one")
    parser.add_argument("--json", metavar="FILE", help="write all figures, and every recovery, to FILE")
    parser.add_argument("--html", metavar="FILE", help="write the report and its picture to one HTML file")
    parser.add_argument(
        "--plot", metavar="PNG", help="draw progress, parts of the wall clock and skewness, and the same as *_dark.png"
    )
    return parser


@escapes_output
def main(argv: list[str] | None = None) -> int:
    """Runs the tool; returns the exit status: 0, or 1 on an error."""
    args = build_parser().parse_args(argv)
    path = ""
    try:
        runs, events = [], []
        for path in dict.fromkeys(args.events):
            events.append(read_events(path))
            try:
                runs.append(compute_report(str(events_file(path).parent), events[-1]))
            except ValueError as error:
                raise ReportError(f"{events_file(path)}: {error}", code=code_of(error)) from None
        print_reports(runs)
        if args.json:
            path = args.json
            with replacing(path) as name:
                Path(name).write_text(json.dumps([dataclasses.asdict(run) for run in runs], indent=2) + "\n")
        if args.html:
            path = args.html
            _write_html(path, runs, events)
        if args.plot:
            path = args.plot
            draw_report(path, runs, events)
    except (ValueError, OSError) as error:
        return refused("report", error, path)
    return 0
