"""Finds the problems of a job that an operator should look at; docs/how-to/monitoring.md has the same alerts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

from moc.cli_output import counted
from moc.files.event_log import RecordedLoss
from moc.monitor.job_view import JobView, describe_loss
from moc.report.run_state import NO_RUN, RunState

HOUR_S = 3600.0
"""Age in seconds of the oldest recent event."""

STORAGE_AGE_S = 1800.0
"""Seconds without a new snapshot in storage that are a problem, for a run that writes snapshots there."""

REPLACEMENTS = 3
"""Replacements of one worker within an hour that are a problem."""

STALL_SHARE, CRITICAL_STALL_SHARE = 0.02, 0.25
"""Shares of time in stalls that are a problem, and a critical one."""

RECENT_S = 600.0
"""Seconds of training, before the newest iteration, over which stalls are also judged."""

SILENCE_S = 30.0
"""Seconds without an event that are a problem, if they are also ten iterations."""

START_SILENCE_S = 600.0
"""Seconds without an event before the first iteration that are a problem."""


@dataclass(frozen=True)
class Problem:
    """A problem: whether training stands still or state is at risk, a sentence, and the remedy."""

    is_critical: bool
    text: str
    remedy: str = ""


def find_problems(state: RunState, job: JobView, now: float) -> tuple[Problem, ...]:
    """Returns the problems of a job at a time in Unix seconds, critical ones first."""
    state = NO_RUN if is_starting_again(state, job) else state
    problems = [*_job_problems(state, job), *_training_problems(state, job, now), *_snapshot_problems(state, now)]
    return tuple(sorted(problems, key=lambda problem: not problem.is_critical))


def describe_age(seconds: float) -> str:
    """Returns an age of at least two days, hours or minutes, or in seconds; negative ages of differing clocks are 0."""
    for unit, size_s in (("days", 86400.0), ("hours", HOUR_S), ("minutes", 60.0)):
        if seconds >= 2 * size_s:
            return f"{seconds / size_s:,.0f} {unit}"
    return f"{max(0.0, seconds):,.0f} s"


_OF_KILLS = (
    "signal 9 killed it each time: read the kernel log of that node (dmesg) for the out-of-memory killer, and the "
    "limits of its container or Slurm job"
)


def is_silent(state: RunState, job: JobView, now: float) -> bool:
    """Returns whether a run that has not ended has written no event for much longer than usual.

    An evaluation writes an event only at its end, and is not silent while its micro batches end.
    """
    has_ended = state.ended or job.end is not None
    if any(worker.section == "evaluation" and worker.seconds < SILENCE_S for worker in job.workers):
        return now - job.time > SILENCE_S
    usual_s = max(SILENCE_S, 10 * state.iteration_s) if state.iteration_s else START_SILENCE_S
    return bool(state.time) and not has_ended and now - state.time > usual_s


def is_starting_again(state: RunState, job: JobView) -> bool:
    """Returns whether the events are of an earlier launch: this one has written no ``start`` yet."""
    launch = state.newest.get("start", {}).get("job")
    return job.end is None and bool(job.job and launch) and launch != job.job


def lacks_events(state: RunState, job: JobView) -> bool:
    """Returns whether the events of a run are on another node, so that this node shows only membership and workers."""
    are_elsewhere = not state.time and job.first_node != job.node
    return are_elsewhere and job.end is None and any(worker.iteration for worker in job.workers)


def is_interrupted(state: RunState, job: JobView) -> bool:
    """Returns whether workers are lost, and training has not resumed since."""
    times = [state.newest[kind]["time"] for kind in ("start", "iteration") if kind in state.newest]
    return state.is_recovering or (bool(state.time) and job.changed_at > max(times, default=0.0))


def _job_problems(state: RunState, job: JobView) -> Iterator[Problem]:
    if lacks_events(state, job):
        node_name = "another node" if job.first_node is None else f"node {job.first_node}"
        yield Problem(
            False,
            f"This page shows only node {job.node}: the events of the run are on {node_name}",
            f"open the page of the launcher of {node_name} for training, incidents and other problems",
        )
    reason, code = job.end or (state.ended, state.exit_code)
    if code:
        yield Problem(
            True,
            f"The job has ended with code {code}: {reason or 'no reason given'}",
            "read the end of the console; code 75 means that the same command resumes",
        )
    elif is_interrupted(state, job):
        generation = state.newest.get("generation") if state.is_recovering else None
        reason = job.loss or (describe_loss(generation) if generation else "a worker was lost, and workers reconnect")
        yield Problem(
            True,
            f"Training is interrupted: {reason}",
            "wait some seconds for the replacement; if it does not come, read its output in --log-dir/workers",
        )
    if lost_nodes := sorted(node for node, node_state in (job.states or {}).items() if node_state == "lost"):
        yield Problem(
            True,
            f"Lost: {', '.join(f'node {node}' for node in lost_nodes[:20])}{' ...' * (len(lost_nodes) > 20)}",
            "start the launcher of each again, there or on another machine; the job waits for --max-wait",
        )
    if count := job.workers_by_state["lost"]:
        yield Problem(
            True,
            f"Of node {job.node}, {counted(count, 'worker')} {'is' if count == 1 else 'are'} not running",
            "read the output of the ranks that are missing below, in --log-dir/workers",
        )


def _training_problems(state: RunState, job: JobView, now: float) -> Iterator[Problem]:
    if is_silent(state, job, now):
        usual_pace = (
            f"an iteration usually takes {state.iteration_s:.3g} s" if state.iteration_s else "no iteration is complete"
        )
        silence = f"No event for {describe_age(now - state.time)}; {usual_pace}"
        yield Problem(
            True,
            f"{silence}{_describe_busy_workers(job)}",
            "check that the job still runs, and read the output of workers that do not wait in --log-dir/workers; in "
            "section save, check the storage of --ckpt-dir",
        )
    recent = [recovery for recovery in state.recoveries if now - recovery.time < HOUR_S]
    losses_by_rank: dict[int, list[tuple[float, RecordedLoss]]] = {}
    for at, loss in state.losses:
        if now - at < HOUR_S and loss.rank is not None:
            losses_by_rank.setdefault(loss.rank, []).append((at, loss))
    for rank, losses in losses_by_rank.items():
        if len(losses) >= REPLACEMENTS:
            nodes = sorted({loss.node for _, loss in losses if loss.node is not None})
            location = f" (node {', '.join(map(str, nodes))})" if nodes else ""
            newest = describe_age(now - max(at for at, _ in losses))
            were_killed = {loss.signal for _, loss in losses} == {signal.SIGKILL}
            yield Problem(
                False,
                f"Worker {rank}{location} was lost {len(losses)} times within an hour, the last time {newest} ago",
                _OF_KILLS if were_killed else "compare the causes below; test the device and the memory of that node",
            )
    if state.newest.get("iteration", {}).get("skipped"):
        yield Problem(
            False,
            "The newest update was skipped: its gradient norm is not finite",
            "watch the loss; if more updates are skipped, lower --lr or resume from an older checkpoint",
        )
    if any(recovery.exact is False for recovery in recent):
        yield Problem(
            False,
            "A recovery did not reproduce the iterations that it repeated",
            "read the warning on the console; without --allow-nondeterministic, test the memory of the node",
        )


def _describe_busy_workers(job: JobView) -> str:
    """Returns the workers of this node that do not wait in a collective."""
    busy = [worker for worker in job.workers if worker.state != "waiting"]
    if not busy:
        return ". All workers of this node wait for others" if job.workers else ""
    named = [
        f"worker {worker.rank} ({worker.section or worker.state}, for {worker.seconds:.0f} s)"
        for worker in busy[:_NAMED]
    ]
    suffix = "; the others wait" if len(busy) < len(job.workers) else ""
    return f". Not waiting: {', '.join(named)}{' ...' * (len(busy) > _NAMED)}{suffix}"


_NAMED = 5
"""Most workers that a problem names."""

_OF_STORAGE = "free space in the storage of snapshots and checkpoints, or correct its permissions; saves are repeated"
_OF_STORAGE_AGE = "check whether the storage of --ckpt-dir is full, slow or hanging"
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
"""Events that are problems for an hour: type, sentence and remedy."""


def _snapshot_problems(state: RunState, now: float) -> Iterator[Problem]:
    persist, newest = state.newest.get("persist"), state.newest.get("iteration", {})
    age_s = now - persist["time"] if persist is not None else 0.0
    repeated = newest.get("storage_age") or 0.0
    if state.ended:
        pass
    elif age_s > STORAGE_AGE_S:
        text = f"The newest snapshot in storage is {describe_age(age_s)} old"
        yield Problem(True, text, _OF_STORAGE_AGE)
    elif newest.get("storage_overdue"):
        age_text = (
            f"the newest snapshot there is {describe_age(age_s)} old" if persist is not None else "no snapshot is there"
        )
        text = f"Storage is behind: {age_text}, and a loss of all memory would repeat {repeated:,.0f} iterations"
        yield Problem(persist is None, text, _OF_STORAGE_AGE)
    silent = state.newest.get("storage_silent")
    answered = [state.newest[kind]["time"] for kind in ("persist", "storage_awaited") if kind in state.newest]
    if silent is not None and not state.ended and silent["time"] > max(answered, default=0.0):
        consequence = "training waits for it" if silent["waits"] else "no snapshot goes there"
        yield Problem(silent["waits"], f"{silent['where']} does not answer: {consequence}", _OF_STORAGE_AGE)
    replicas = state.newest.get("expert_replicas", {})
    if replicas.get("fewer") and not state.ended:
        shortage = (
            f"{replicas['fewer']:,} of {replicas['experts']:,} experts have fewer than {replicas['wanted']:,} replicas"
        )
        yield Problem(
            True,
            f"{shortage}, and some have {replicas['least']:,}: {_describe_expert_loss(replicas['least'])}",
            "start the launchers of lost nodes again, or raise --elastic-slots",
        )
    for kind, text, remedy in _WARNINGS:
        event = state.newest.get(kind)
        if event is not None and now - event["time"] < HOUR_S:
            reason, count = event.get("reason"), state.of_type(kind).count
            times = f"{counted(count, 'time')}, last {describe_age(now - event['time'])} ago"
            yield Problem(False, f"{text} ({times}){'' if reason is None else f': {reason}'}", remedy)
    share = state.spent.stalls_s / state.spent.wall_s if state.spent.wall_s > 0 else 0.0
    recent = _recent_stalls(state)
    if max(share, recent) > STALL_SHARE and not state.ended:
        text = (
            f"Training waits for snapshots: {100 * recent:.1f} % of the newest {RECENT_S / 60:.0f} minutes of training"
        )
        text += f", {100 * share:.1f} % of the wall clock"
        yield Problem(
            recent > CRITICAL_STALL_SHARE, text, "raise --snapshot-interval, or choose a policy that saves less"
        )


def _describe_expert_loss(replicas: int) -> str:
    return f"the loss of {counted(replicas, 'more node')} can lose them"


def _recent_stalls(state: RunState) -> float:
    """Returns the share of stalls in the newest iterations."""
    if not state.history:
        return 0.0
    begin = state.history[-1][1].event["time"] - RECENT_S
    recent = [trained for _, trained in state.history if trained.event["time"] > begin]
    elapsed_s = sum(trained.event["elapsed_s"] for trained in recent)
    return sum(trained.stalled_s for trained in recent) / elapsed_s if elapsed_s > 0 else 0.0
