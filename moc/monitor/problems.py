"""Finds the problems of a job that an operator should look at; docs/how-to/monitoring.md has the same alerts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from moc.cli_output import counted
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
    """A problem: whether training stands still or state is at risk, one sentence, and what to do about it."""

    is_critical: bool
    text: str
    remedy: str = ""


def find_problems(state: RunState, job: JobView, now: float) -> tuple[Problem, ...]:
    """Returns the problems of a job at a time in Unix seconds, critical ones first."""
    found = [*_of_job(state, job), *_of_training(state, job, now), *_of_snapshots(state, now)]
    return tuple(sorted(found, key=lambda problem: not problem.is_critical))


def is_silent(state: RunState, job: JobView, now: float) -> bool:
    """Returns whether a run that has not ended has written no event for much longer than usual."""
    has_ended = state.ended or job.end is not None
    return bool(state.time) and not has_ended and now - state.time > max(SILENCE_S, 10 * state.iteration_s)


def is_interrupted(state: RunState, job: JobView) -> bool:
    """Returns whether workers are lost, and training has not resumed since."""
    times = [state.newest[kind]["time"] for kind in ("start", "iteration") if kind in state.newest]
    return state.is_recovering or (bool(state.time) and job.changed_at > max(times, default=0.0))


def _of_job(state: RunState, job: JobView) -> Iterator[Problem]:
    if job.end is not None and job.end[1]:
        yield Problem(
            True,
            f"The job has ended with code {job.end[1]}: {job.end[0] or 'no reason given'}",
            "read the end of the console; code 75 means that the same command resumes",
        )
    elif is_interrupted(state, job):
        reason = state.newest.get("generation", {}).get("reason") if state.is_recovering else None
        yield Problem(
            True,
            f"Training is interrupted: {reason or 'a worker was lost, and workers reconnect'}",
            "wait some seconds for the replacement; if it does not come, read its output in --log-dir/workers",
        )
    if lost := sorted(node for node, what in (job.states or {}).items() if what == "lost"):
        yield Problem(
            True,
            f"Lost: {', '.join(f'node {node}' for node in lost[:20])}{' ...' * (len(lost) > 20)}",
            "start the launcher of each again, there or on another machine; the job waits for --max-wait",
        )
    if count := job.workers_by_state["lost"]:
        yield Problem(
            True,
            f"Of node {job.node}, {counted(count, 'worker')} {'is' if count == 1 else 'are'} not running",
            "read the output of the ranks that are missing below, in --log-dir/workers",
        )


def _of_training(state: RunState, job: JobView, now: float) -> Iterator[Problem]:
    if is_silent(state, job, now):
        silence = f"No event for {now - state.time:,.0f} s; an iteration usually takes {state.iteration_s:.3g} s"
        yield Problem(
            True,
            f"{silence}{_who_is_waited_for(job)}",
            "read the output of workers that do not wait, in --log-dir/workers",
        )
    recent = [one for one in state.recoveries if now - one.time < HOUR_S]
    losses = [loss for at, loss in state.losses if now - at < HOUR_S]
    for rank, count in Counter(loss.rank for loss in losses if loss.rank is not None).items():
        if count >= REPLACEMENTS:
            nodes = sorted({loss.node for loss in losses if loss.rank == rank and loss.node is not None})
            where = f" (node {', '.join(map(str, nodes))})" if nodes else ""
            text = f"Worker {rank}{where} was lost {count} times within an hour"
            yield Problem(False, text, "compare the causes below; test the device and the memory of that node")
    if state.newest.get("iteration", {}).get("skipped"):
        yield Problem(
            False,
            "The newest update was skipped: its gradient norm is not finite",
            "watch the loss; if more updates are skipped, lower --lr or resume from an older checkpoint",
        )
    if any(one.exact is False for one in recent):
        yield Problem(
            False,
            "A recovery did not reproduce the iterations that it repeated",
            "read the warning on the console; without --allow-nondeterministic, test the memory of the node",
        )


def _who_is_waited_for(job: JobView) -> str:
    """Returns the workers of this node that do not wait, while others do."""
    busy = [one for one in job.workers if one.state != "waiting"]
    if "lost" in (job.states or {}).values() or not busy or len(busy) == len(job.workers):
        return ""
    named = [f"worker {one.rank} ({one.state}, {one.section or 'no section'})" for one in busy[:_NAMED]]
    return f". Others wait for {', '.join(named)}{' ...' * (len(busy) > _NAMED)}"


_NAMED = 5
"""Most workers that a problem names."""

_OF_STORAGE = "free space in the storage of snapshots and checkpoints, or correct its permissions; saves are repeated"
_OF_MEMORY = (
    "free memory of the node that the console names, or lower --replicas or the number of experts in a snapshot"
)
_WARNINGS = (
    ("save_failed", "A snapshot or checkpoint could not be written", _OF_STORAGE),
    (
        "save_skipped",
        "Storage is too slow: a snapshot was not written",
        "raise --persist-interval, or use faster storage",
    ),
    ("copy_missing", "A snapshot has fewer copies on other nodes than wanted", _OF_MEMORY),
    ("abandoned", "A snapshot was abandoned: a worker lacked memory", _OF_MEMORY),
    ("memory_short", "A node has too little memory for all snapshots", _OF_MEMORY),
    (
        "at_risk",
        "The next fault would lose too many tokens",
        "raise the number of experts in a snapshot (--pec-k-snapshot)",
    ),
    ("fallback", "So many nodes were lost that a checkpoint was read", "raise --replicas if nodes fail together"),
)
"""Events that are problems for an hour: type, sentence, and what to do."""


def _of_snapshots(state: RunState, now: float) -> Iterator[Problem]:
    persist = state.newest.get("persist")
    age_s = now - persist["time"] if persist is not None else 0.0
    if age_s > STORAGE_AGE_S and not state.ended:
        text = f"The newest snapshot in storage is {age_s / 60:,.0f} minutes old"
        yield Problem(True, text, "check whether the storage of --ckpt-dir is full or slow")
    for kind, text, remedy in _WARNINGS:
        event = state.newest.get(kind)
        if event is not None and now - event["time"] < HOUR_S:
            reason, count = event.get("reason"), state.of_type(kind).count
            times = f"{counted(count, 'time')}, last {(now - event['time']) / 60:,.0f} minutes ago"
            yield Problem(False, f"{text} ({times}){'' if reason is None else f': {reason}'}", remedy)
    share = state.spent.stalls_s / state.spent.wall_s if state.spent.wall_s > 0 else 0.0
    if share > STALL_SHARE:
        text = f"Training has waited for snapshots for {100 * share:.1f} % of the wall clock"
        yield Problem(False, text, "raise --snapshot-interval, or choose a policy that saves less")
