"""Draws the progress of runs and the uses of their wall clock, and writes them to one HTML file for a post-mortem."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from moc.cli_output import replacing
from moc.files.decode import escape_controls
from moc.plots import MARKS_PAD, LossMark, add_legend, add_marks, distinct_names, drawings, paper
from moc.report.figures import Report
from moc.report.wall_clock import Event, RecoveryTimes

PART_TITLES = {
    "useful_s": "useful work",
    "stalls_s": "stalls for snapshots",
    "slower_s": "difference from the median",
    "again_s": "computing again",
    "recoveries_s": "recoveries",
    "stopped_s": "until started again",
    "start_up_s": "start-up",
    "pauses_s": "evaluation, saves",
    "other_s": "other",
}
"""Titles of the fields of :class:`moc.report.wall_clock.Spent`, in table order."""

_STYLE = """\
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 1.5rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .15rem 1rem .15rem 0; vertical-align: top; white-space: pre-line; }
th { opacity: .7; } div { overflow-x: auto; } img { max-width: 100%; }
"""

Section = tuple[str, Sequence[str], Iterable[Sequence[str]]]
"""Title of a table, titles of its columns, and its rows."""


def draw_report(path: str, runs: Sequence[Report], events: Sequence[Sequence[Event]]) -> None:
    """Draws runs, with the events of each, into a PNG and its dark twin; replaces them atomically."""
    varies = any(len({period.workers for period in run.periods}) > 1 for run in runs)
    panels = [_draw_progress, *([_draw_workers] if varies else []), _draw_parts]
    panels += [_draw_skewness] if any("skewness" in run.gauges for run in runs) else []
    names = distinct_names([run.name for run in runs])
    for _, axes in drawings(path, len(panels), figsize=(9, 3.9 * len(panels))):
        for panel, draw in zip(axes[:, 0], panels, strict=True):
            draw(panel, dict(zip(names, runs, strict=True)), events)


def _draw_progress(panel, runs: Mapping[str, Report], events: Sequence[Sequence[Event]]) -> None:
    for number, ((name, run), run_events) in enumerate(zip(runs.items(), events, strict=True)):
        trained = [event for event in run_events if event["type"] == "iteration"]
        times, iterations = zip(*((e["time"] - run.began, e["iteration"]) for e in trained), strict=True)
        panel.plot(times, iterations, color=f"C{number}", label=f"{name} (ETTR {run.ettr:.3f})")
    for number, run in enumerate(runs.values()):
        add_marks(panel, [_mark_of(recovery, run.began) for recovery in run.each], f"C{number}")
    panel.set_title(
        "Progress; shaded: no useful work", pad=MARKS_PAD if any(run.each for run in runs.values()) else None
    )
    panel.set(xlabel="seconds since the begin", ylabel="iteration")
    add_legend(panel)


def _mark_of(recovery: RecoveryTimes, began: float) -> LossMark:
    """Returns the mark where training resumed, seconds since the begin of the run."""
    label = "; ".join(dict.fromkeys(loss.title for loss in recovery.losses)) or "restarted"
    at = recovery.time - began
    return LossMark(at, label, recovery.outside_s, max(0.0, at - recovery.outside_s))


def _draw_workers(panel, runs: Mapping[str, Report], events: Sequence[Sequence[Event]]) -> None:
    for number, (name, run) in enumerate(runs.items()):
        edges = [(edge, period.workers) for period in run.periods for edge in (period.began_s, period.ended_s)]
        panel.plot(*zip(*edges, strict=True), color=f"C{number}", linewidth=0.8, linestyle=":")
        for period in run.periods:
            ends, workers = (period.began_s, period.ended_s), (period.workers, period.workers)
            label = name if period is run.periods[0] else None
            panel.plot(ends, workers, color=f"C{number}", linewidth=2.5, label=label)
    panel.set_title("Workers that train; dotted: none trains")
    panel.set(xlabel="seconds since the begin", ylabel="workers", ylim=(0, None))
    panel.yaxis.get_major_locator().set_params(integer=True)
    add_legend(panel)


def _draw_parts(panel, runs: Mapping[str, Report], events: Sequence[Sequence[Event]]) -> None:
    offsets = [0.0] * len(runs)
    for number, (name, title) in enumerate(PART_TITLES.items()):
        shares = [100 * max(0.0, _drawn_seconds(run, name)) / run.wall_s for run in runs.values()]
        if any(shares):
            panel.barh([*runs], shares, left=offsets, color=f"C{number}", edgecolor=paper(), label=title)
        offsets = [a + b for a, b in zip(offsets, shares, strict=True)]
    panel.set_title("Uses of the wall clock")
    panel.set(xlabel="share of the wall clock, %", xlim=(0, 100))
    panel.invert_yaxis()
    add_legend(panel)


def _drawn_seconds(run: Report, name: str) -> float:
    """Returns the seconds to draw; a negative ``slower_s`` is subtracted from the useful time."""
    faster_s = min(0.0, run.spent.slower_s) if name == "useful_s" else 0.0
    return getattr(run.spent, name) + faster_s


def _draw_skewness(panel, runs: Mapping[str, Report], events: Sequence[Sequence[Event]]) -> None:
    for number, (name, run_events) in enumerate(zip(runs, events, strict=True)):
        points = {event["iteration"]: event["skewness"] for event in run_events if "skewness" in event}
        if points:
            panel.plot(points.keys(), points.values(), color=f"C{number}", label=name)
    panel.set_title("Load of the experts")
    panel.set(xlabel="iteration", ylabel="skewness (0: equal, 1: one expert)", ylim=(0, None))
    add_legend(panel)


def write_html(
    path: str, title: str, lead: Iterable[str], light: bytes, dark: bytes, sections: Iterable[Section]
) -> None:
    """Writes lead lines, a picture (PNG, light and dark) and tables to an HTML file; replaces it atomically.

    Tables without rows are left out.
    """
    urls = [f"data:image/png;base64,{base64.b64encode(picture).decode()}" for picture in (light, dark)]
    image = f'<img alt="progress, and uses of the wall clock" src="{urls[0]}">'
    image = f'<picture><source media="(prefers-color-scheme: dark)" srcset="{urls[1]}">{image}</picture>'
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{_STYLE}</style>'
    lines = "".join(f"<p><strong>{_text(line)}</strong></p>" for line in lead)
    body = f"<h1>{_text(title)}</h1>{lines}{image}{''.join(_section(*section) for section in sections)}"
    with replacing(path) as name:
        html = f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'
        Path(name).write_text(html, encoding="utf-8")


def _text(value: str) -> str:
    return escape(escape_controls(value))


def _section(title: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows]
    if not lines:
        return ""
    head = "".join(f"<th>{_text(cell)}</th>" for cell in titles)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2>{_text(title)}</h2><div><table><tr>{head}</tr>{body}</table></div>"
