"""Summarizes the state of a job for people: problems, figures and tables, shared by page and terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moc.cli_output import human
from moc.monitor.job_view import JobView
from moc.monitor.problems import (
    Problem,
    describe_age,
    find_problems,
    is_interrupted,
    is_silent,
    is_starting_again,
    lacks_events,
)
from moc.report.report import INCIDENT_TITLES, PART_TITLES, incident_rows, seconds
from moc.report.run_state import RunState

MOST_ROWS, MOST_CHARACTERS = 50, 500
"""Most rows of a table, and characters of a cell: they limit the size of an update."""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        titles: titles of the columns.
        rows: cells of at most :data:`MOST_ROWS` rows.
        omitted: number of further rows.
    """

    title: str
    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    omitted: int


@dataclass(frozen=True)
class JobSummary:
    """Summary of a job; its strings may have come from others, and are not escaped.

    Attributes:
        run: name of the run.
        job: id of the launch; empty if it is unknown.
        status: ``starting``, ``training``, ``interrupted`` by a loss, ``silent`` without events, or ``ended``;
            the iteration of this node's workers if only another node has the events.
        problems: problems, critical ones first.
        figures: values by title.
        tables: tables without empty ones.
    """

    run: str
    job: str
    status: str
    problems: tuple[Problem, ...]
    figures: Mapping[str, str]
    tables: tuple[Table, ...]


def summarize(state: RunState, job: JobView, now: float) -> JobSummary:
    """Returns the summary at a time in Unix seconds."""
    start = state.newest.get("start", {})
    tables = [
        _table("Workers of this node", _WORKER_TITLES, _workers(job)),
        _table("Incidents, newest first", INCIDENT_TITLES, _incidents(state)),
        _table("Where the time went", ("use", "seconds", "share"), _parts(state)),
        _table("Snapshots", ("place", "snapshots", "newest iteration", "age"), _tiers(state, now)),
        _table("Configuration", ("what", "value"), _configuration(state, job)),
        _table("Latest events", ("time", "event", "content"), _events(state)),
    ]
    return JobSummary(
        run=_short(start.get("run") or ("run without snapshots" if start else "run")),
        job=job.job or _short(start.get("job") or ""),
        status=_status(state, job, now),
        problems=tuple(replace(problem, text=_short(problem.text)) for problem in find_problems(state, job, now)),
        figures=_figures(state, now),
        tables=tuple(table for table in tables if table.rows),
    )


def _status(state: RunState, job: JobView, now: float) -> str:
    if is_starting_again(state, job):
        return "starting"
    if state.ended or job.end:
        return "ended"
    if is_silent(state, job, now):
        return "silent"
    if lacks_events(state, job):
        return f"iteration {max(worker.iteration or 0 for worker in job.workers):,}"
    return "interrupted" if is_interrupted(state, job) else "training" if state.time else "starting"


_WORKER_TITLES = "rank", "process", "state", "section", "seconds in it", "newest iteration"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."


def _table(title: str, titles: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    cells = [tuple(_short(cell) for cell in row) for row in rows]
    return Table(title, tuple(titles), tuple(cells[:MOST_ROWS]), max(0, len(cells) - MOST_ROWS))


def _figures(state: RunState, now: float) -> dict[str, str]:
    newest = state.newest.get("iteration", {})
    loss = newest.get("loss")
    speed = f"{newest['tokens'] / newest['elapsed_s']:,.0f}" if newest.get("elapsed_s") and newest["tokens"] else "-"
    return {
        "iteration": f"{state.last_iteration:,}",
        "loss, nats per token": "-" if loss is None else f"{loss:.4f}",
        "tokens per second": speed,
        "seconds of an iteration": f"{state.iteration_s:.3g}",
        **({"MFU": f"{100 * mfu:.1f} %"} if (mfu := newest.get("mfu")) is not None else {}),
        "ETTR (useful share)": f"{state.ettr:.3f}",
        "workers": f"{state.workers:,}",
        "recoveries": f"{len(state.recoveries):,}",
        "newest event": f"{describe_age(now - state.time)} ago" if state.time else "-",
    }


def _incidents(state: RunState) -> Iterable[Sequence[str]]:
    return reversed(incident_rows(state.recoveries, state.unrecovered, state.last_iteration))


def _parts(state: RunState) -> Iterable[tuple[str, str, str]]:
    wall_s = state.spent.wall_s
    for name, title in PART_TITLES.items():
        if wall_s > 0 and (spent_s := getattr(state.spent, name)):
            yield title, seconds(spent_s) or "", f"{100 * spent_s / wall_s:.1f} %"


def _tiers(state: RunState, now: float) -> Iterable[Sequence[object]]:
    for place, event in state.newest_snapshots.items():
        count, age = state.of_type(event["type"]).count, describe_age(now - event["time"])
        yield place, f"{count:,}", f"{event['iteration']:,}", age


def _configuration(state: RunState, job: JobView) -> Iterable[tuple[str, object]]:
    if job.states is not None:
        yield "controller", f"candidate {job.leader}, epoch {job.epoch}; generation {job.generation}"
        yield "nodes", ", ".join(f"{count} {node_state}" for node_state, count in job.nodes_by_state.items())
        yield "replaced workers", f"{job.restarts:,}"
    if job.lease_s is not None:
        yield "lease of this node", f"{job.lease_s:.1f} s"
    for kind in ("start", "memory", "placement", "expected", "choice"):
        if (event := state.newest.get(kind)) is not None:
            yield kind, _fields(event)


def _fields(event: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_value(name, value)}" for name, value in event.items() if name not in ("type", "time"))


def _value(name: str, value: Any) -> str:
    if name in ("bytes", "own", "copies", "experts", "small", "logs") and isinstance(value, int | float):
        return human(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _workers(job: JobView) -> Iterable[Sequence[object]]:
    for worker in job.workers:
        yield (
            worker.rank,
            worker.pid or "",
            worker.state,
            worker.section or "",
            f"{worker.seconds:.1f}",
            worker.iteration or 0,
        )


def _clock(time_s: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(time_s))


def _events(state: RunState) -> list[tuple[str, object, str]]:
    return [(_clock(event["time"]), event["type"], _fields(event)) for event in reversed(state.recent)]
