"""Renders the page about a job: one HTML document, whose content the server sends again after each change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from moc.files.decode import escape_controls
from moc.monitor.job_view import JobView
from moc.monitor.summary import MOST_ROWS, JobSummary, Table, summarize
from moc.report.run_state import RunState

MOST_NODES = 3000
"""Most nodes of the grid, which limits the size of an update."""

_POINTS = 300  # points of a curve
_WIDTH, _HEIGHT = 900, 160  # of a drawing, in pixels

STYLE = """\
:root { color-scheme: light dark; --ink: #1c2430; --pale: #687385; --back: #fff; --line: #d5dae1; --good: #2a7d4f;
  --bad: #b3261e; --warn: #a15c00; --accent: #2460a7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --pale: #98a2b3; --back: #14181f; --line: #39424f;
  --good: #58b883; --bad: #ff8a80; --warn: #f0b155; --accent: #7fb2ee; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back); max-width: 1100px;
  margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem .7rem .15rem 0; text-align: left; vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--pale); font-weight: 500; white-space: nowrap; } .scroll { overflow-x: auto; }
.figures { display: flex; flex-wrap: wrap; gap: .4rem 2rem; margin: 0; } .figures div { min-width: 7rem; }
.figures dt { color: var(--pale); font-size: .85rem; } .figures dd { margin: 0; font-size: 1.2rem; }
.problem { border-left: 5px solid var(--warn); padding: .3rem .7rem; margin: .3rem 0; }
.critical { border-color: var(--bad); font-weight: 600; } .problem small { display: block; font-weight: 400; }
.fine { border-color: var(--good); }
.nodes { display: flex; flex-wrap: wrap; gap: 2px; } .nodes i { width: 12px; height: 12px; background: var(--good); }
.nodes .lost { background: var(--bad); } .nodes .partial { background: var(--warn); }
.nodes .not { background: var(--line); }
svg { width: 100%; height: auto; } svg text { fill: var(--pale); font-size: 12px; }
.curve { fill: none; stroke: var(--accent); stroke-width: 1.6; } .loss { stroke: var(--bad); stroke-dasharray: 3 3; }
.frame { fill: none; stroke: var(--line); } #stale { display: none; color: var(--bad); font-weight: 600; }
"""

SCRIPT = """\
const updates = new EventSource("updates");
updates.onmessage = (update) => {
  document.getElementById("content").innerHTML = JSON.parse(update.data);
  document.title = document.querySelector("h1").textContent;
  document.getElementById("stale").style.display = "none";
};
updates.onerror = () => { document.getElementById("stale").style.display = "block"; };
"""

_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="stylesheet" href="page.css"><script src="page.js" defer></script></head>
<body><p id="stale">No connection to the launcher: this page may be old.</p>
<main id="content">{content}</main></body></html>
"""


def render_page(state: RunState, job: JobView, now: float) -> str:
    """Returns the HTML document; foreign strings in it are escaped."""
    summary = summarize(state, job, now)
    return _PAGE.format(title=_title(summary), content=render_content(state, job, now))


def render_content(state: RunState, job: JobView, now: float) -> str:
    """Returns the HTML of the part that changes, of at most 200 kB; ``now`` is in Unix seconds."""
    summary = summarize(state, job, now)
    tables = {table.title: _table(table) for table in summary.tables}
    workers = _nodes(job) + tables.pop("Workers of this node", "")
    incidents = {title: tables.pop(title) for title in [*tables] if title.startswith("Incidents")}
    parts = {"Timeline": _timeline(state, now), "Workers": workers, **incidents, "Loss": _loss(state), **tables}
    sections = (f"<section><h2>{_text(title)}</h2>{html}</section>" for title, html in parts.items() if html)
    return _headline(summary) + "".join(sections)


def _text(value: object) -> str:
    return escape(escape_controls(value))


def _title(summary: JobSummary) -> str:
    return _text(f"{summary.run}, job {summary.job}: {summary.status}")


def _headline(summary: JobSummary) -> str:
    lines = (
        f'<p class="problem{" critical" * problem.is_critical}">{_text(problem.text)}'
        f"<small>To do: {_text(problem.remedy)}.</small></p>"
        for problem in summary.problems
    )
    problems = "".join(lines) or '<p class="problem fine">No problem found.</p>'
    cells = (f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in summary.figures.items())
    return f'<h1>{_title(summary)}</h1>{problems}<dl class="figures">{"".join(cells)}</dl>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(title)}</th>" for title in table.titles)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    omitted = f"<p>{table.omitted:,} more</p>" if table.omitted else ""
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>{omitted}'


def _nodes(job: JobView) -> str:
    """Returns a grid of nodes; training nodes have no title, which keeps the grid small."""
    cells = []
    for node, state in sorted((job.states or {}).items()):
        cells.append("<i></i>" if state == "training" else f'<i class="{state.split()[0]}" title="node {node}"></i>')
    legend = ", ".join(f"{count:,} {state}" for state, count in job.nodes_by_state.items())
    omission = f" The first {MOST_NODES:,} are shown." if len(cells) > MOST_NODES else ""
    return f'<p>Nodes: {legend}.{omission}</p><div class="nodes">{"".join(cells[:MOST_NODES])}</div>' if cells else ""


def _clock(time_s: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(time_s))


def _timeline(state: RunState, now: float) -> str:
    points = [(trained.event["time"], float(number)) for number, trained in state.history]
    losses = [recovery.time for recovery in state.recoveries if points and recovery.time >= points[0][0]]
    if points and not state.ended:
        points.append((now, points[-1][1]))  # flat while training stands still
    return _draw_curve(points, losses, "iteration (dashed: training resumed after a lost worker or node)", "local time")


def _loss(state: RunState) -> str:
    values = ((number, trained.event.get("loss")) for number, trained in state.history)
    points = [(float(number), loss) for number, loss in values if loss is not None]
    return _draw_curve(points, [], "nats per token", "iteration")


def _draw_curve(points: Sequence[tuple[float, float]], marks: Sequence[float], unit: str, axis: str) -> str:
    """Returns an SVG of a curve, with vertical lines at the marks."""
    if len(points) < 2:
        return ""
    step = max(1, len(points) // _POINTS)
    selected = [*points[:-1:step], points[-1]]
    left, right = selected[0][0], selected[-1][0]
    low, high = min(y for _, y in selected), max(y for _, y in selected)
    width, height = _WIDTH / ((right - left) or 1.0), _HEIGHT / ((high - low) or 1.0)
    path = " ".join(f"{(x - left) * width:.1f},{_HEIGHT - (y - low) * height:.1f}" for x, y in selected)
    lines = "".join(
        f'<line class="loss" x1="{(x - left) * width:.1f}" x2="{(x - left) * width:.1f}" y1="0" y2="{_HEIGHT}"/>'
        for x in marks[-MOST_ROWS:]
    )
    ends = (_clock(left), _clock(right)) if axis == "local time" else (f"{left:,.0f}", f"{right:,.0f}")
    return (
        f'<svg viewBox="-10 -20 {_WIDTH + 20} {_HEIGHT + 45}" role="img" aria-label="{_text(unit)}">'
        f'<rect class="frame" width="{_WIDTH}" height="{_HEIGHT}"/>{lines}<polyline class="curve" points="{path}"/>'
        f'<text x="0" y="-6">{_text(unit)}: {low:.6g} to {high:.6g}</text>'
        f'<text x="0" y="{_HEIGHT + 16}">{_text(axis)}: {ends[0]}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 16}" text-anchor="end">{ends[1]}</text></svg>'
    )
