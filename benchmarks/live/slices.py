"""Compares jobs that share a machine in turns of a few seconds, so that other load affects all of them equally.

All jobs are started and warmed up.  Then all but one are stopped (SIGSTOP), and the running job changes every few
seconds.  Ratios of adjacent turns resolve differences of one percent; complete runs, minutes apart, differ by ten.
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
    """Yields for each round, by job, the events of iterations that started and ended in the job's turn.

    The order of turns changes from round to round (:func:`benchmarks.common.rotated`).

    Args:
        jobs: jobs by name, all of them stopped, as they are after each turn.  Their launchers must tolerate missing
            heartbeats of workers during the other jobs' turns (``--silence-timeout``).
        rounds: number of rounds of one turn for each job.
        seconds: seconds of a turn, for several iterations.
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
    """Returns the speedup of each job over the base: ratios of medians and of means by round, and their medians.

    Args:
        rounds: for each round, by job, seconds of its iterations.
        base: the job that the others are compared with.
    """

    def compared(of: Callable, job: str) -> dict:
        values = [of(one[base]) / of(one[job]) for one in rounds]
        return {"median": median(values), "rounds": values}

    return {job: {"median": compared(median, job), "mean": compared(mean, job)} for job in rounds[0]}


def pause(job: Job) -> None:
    """Stops all processes of a job (SIGSTOP)."""
    _signal(job, signal.SIGSTOP)


def resume(job: Job) -> None:
    """Continues all processes of a job (SIGCONT)."""
    _signal(job, signal.SIGCONT)


def _signal(job: Job, which: signal.Signals) -> None:
    launcher = psutil.Process(job.process.pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        with suppress(ProcessLookupError):
            os.kill(process.pid, which)
