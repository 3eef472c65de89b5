"""Finds the problems of a job that an operator should look at; docs/how-to/monitoring.md has the same alerts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from moc.monitor.job_view import JobView
from moc.report.run_state import RunState

HOUR_S = 3600.0
"""Age in seconds of the oldest recent event."""

STORAGE_AGE_S = 1800.0
"""Seconds without a new snapshot in storage that are a problem, for a run that writes snapshots there."""

REPLACEMENTS = 3
"""Replacements of one worker within an hour that are a problem."""

STALL_SHARE = 0.02
"""Share of the wall clock in stalls that is a problem."""

SILENCE_S = 60.0
"""Seconds without an event that are a problem, if they are also ten iterations."""


@dataclass(frozen=True)
class Problem:
    """A problem: whether training stands still or state is at risk, and one sentence."""

    is_critical: bool
    text: str


def find_problems(state: RunState, job: JobView, now: float) -> tuple[Problem, ...]:
    """Returns the problems of a job at a time in Unix seconds, critical ones first."""
    found = [*_of_job(state, job), *_of_training(state, job, now), *_of_snapshots(state, now)]
    return tuple(sorted(found, key=lambda problem: not problem.is_critical))


def _of_job(state: RunState, job: JobView) -> Iterator[Problem]:
    times = [state.newest[kind]["time"] for kind in ("start", "iteration") if kind in state.newest]
    if job.end is not None and job.end[1]:
        yield Problem(True, f"The job has ended with code {job.end[1]}: {job.end[0] or 'no reason given'}")
    elif state.is_recovering or (state.time and job.changed_at > max(times, default=0.0)):
        reason = state.newest.get("generation", {}).get("reason") if state.is_recovering else None
        yield Problem(True, f"Training is interrupted: {reason or 'a worker was lost, and workers reconnect'}")
    if lost := sorted(node for node, what in (job.states or {}).items() if what == "lost"):
        yield Problem(True, f"Lost nodes: {', '.join(map(str, lost[:20]))}{' ...' * (len(lost) > 20)}")
    if count := job.workers_by_state["lost"]:
        yield Problem(True, f"Workers of node {job.node} that are not running: {count}")


def _of_training(state: RunState, job: JobView, now: float) -> Iterator[Problem]:
    silent_s = now - state.time
    if state.time and not state.ended and job.end is None and silent_s > max(SILENCE_S, 10 * state.iteration_s):
        yield Problem(True, f"No event for {silent_s:,.0f} s; an iteration usually takes {state.iteration_s:.3g} s")
    recent = [one for one in state.recoveries if now - one.time < HOUR_S]
    for rank, count in Counter(one.rank for one in recent if one.rank is not None).items():
        if count >= REPLACEMENTS:
            nodes = sorted({one.node for one in recent if one.rank == rank and one.node is not None})
            where = f" (node {', '.join(map(str, nodes))})" if nodes else ""
            yield Problem(False, f"Worker {rank}{where} was lost {count} times within an hour")
    if state.newest.get("iteration", {}).get("skipped"):
        yield Problem(False, "The newest update was skipped: its gradient norm is not finite")
    if any(one.exact is False for one in recent):
        yield Problem(False, "A recovery did not reproduce the iterations that it repeated")


def _of_snapshots(state: RunState, now: float) -> Iterator[Problem]:
    persist = state.newest.get("persist")
    age_s = now - persist["time"] if persist is not None else 0.0
    if age_s > STORAGE_AGE_S and not state.ended:
        yield Problem(True, f"The newest snapshot in storage is {age_s / 60:,.0f} minutes old")
    for kind, text in (
        ("save_failed", "A snapshot or checkpoint could not be written"),
        ("save_skipped", "Storage is too slow: a snapshot was not written"),
        ("copy_missing", "A snapshot has fewer copies on other nodes than wanted"),
        ("abandoned", "A snapshot was abandoned: a worker lacked memory"),
        ("memory_short", "A node has too little memory for all snapshots"),
        ("at_risk", "The next fault would lose too many tokens"),
        ("fallback", "So many nodes were lost that a checkpoint was read"),
    ):
        event = state.newest.get(kind)
        if event is not None and now - event["time"] < HOUR_S:
            reason = event.get("reason")
            yield Problem(False, text if reason is None else f"{text}: {reason}")
    share = state.spent.stalls_s / state.spent.wall_s if state.spent.wall_s > 0 else 0.0
    if share > STALL_SHARE:
        yield Problem(False, f"Training has waited for snapshots for {100 * share:.1f} % of the wall clock")
