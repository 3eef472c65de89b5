"""Jobs that share a machine by turns of a few seconds, so that whatever else it does meets all of them alike.

All are started and warmed up; then all but one are stopped (SIGSTOP), and which one that is changes every few seconds.
Ratios of neighbouring turns tell differences of a percent, where whole runs, minutes apart, differ by ten.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import mean, median

import psutil

from benchmarks.common import rotated
from benchmarks.live.job import Job


def warm_up(job: Job, iterations: int) -> None:
    """Lets a job run until an iteration is complete, then stops it."""
    job.reach(iterations)
    pause(job)


def slices(jobs: Mapping[str, Job], rounds: int, seconds: float) -> Iterator[dict[str, list[dict]]]:
    """Of each round, by job, the events ``iteration`` of those that began and ended in its turn.  The order of turns
    changes from round to round (:func:`benchmarks.common.rotated`).

    Args:
        jobs: by name, all of them stopped; they are so again after each turn.  Their launchers must bear to hear
            nothing of their workers for as long as the other jobs' turns take, as ours do (``--silence-timeout``).
        rounds: of one turn for each job.
        seconds: of a turn; several iterations.
    """
    for number in range(rounds):
        told = {name: _turn(jobs[name], seconds) for name in rotated(list(jobs), number)}
        yield {name: told[name] for name in jobs}


def _turn(job: Job, seconds: float) -> list[dict]:
    begin = time.time()
    resume(job)
    time.sleep(seconds)
    pause(job)
    end = time.time()
    if job.process.poll() is not None:
        raise RuntimeError(f"a job has ended; its last words:\n{job.last_words()}")
    of_turn = [event for event in job.events.of("iteration") if event["time"] <= end]
    return [event for event in of_turn if event["time"] - event["elapsed_s"] >= begin]


def ratios(rounds: Sequence[Mapping[str, Sequence[float]]], base: str) -> dict[str, dict]:
    """By job, the seconds of the base divided by its own: of medians and of means, for each round, and their medians.

    Args:
        rounds: of each, by job, seconds of its iterations.
        base: the job that the others are compared with.
    """

    def compared(of: Callable, job: str) -> dict:
        values = [of(one[base]) / of(one[job]) for one in rounds]
        return {"median": median(values), "rounds": values}

    return {job: {"median": compared(median, job), "mean": compared(mean, job)} for job in rounds[0]}


def pause(job: Job) -> None:
    """Stops all of a job's processes where they are."""
    _signal(job, signal.SIGSTOP)


def resume(job: Job) -> None:
    """Lets all of a job's processes go on."""
    _signal(job, signal.SIGCONT)


def _signal(job: Job, which: signal.Signals) -> None:
    launcher = psutil.Process(job.process.pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        with suppress(ProcessLookupError):
            os.kill(process.pid, which)
