"""Ways to run one job, which take turns: what happened in each, and their iterations beside those of another."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import TypeVar

from benchmarks.live.job import Job

Told = TypeVar("Told")


def run_to_end(command: Sequence[object], saves: bool, memory: bool) -> list[dict]:
    """Runs a job to its end, in directories of its own, which are gone from the disk before the next job begins.

    Args:
        command: as for :class:`Job`.
        saves: whether it has a directory for snapshots.
        memory: whether it has one in memory too.

    Returns:
        Its events.

    Raises:
        RuntimeError: it failed; with its last words.
    """
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        directory = Path(name)
        command = [*command, *(["--ckpt-dir", directory / "snapshots"] if saves else [])]
        with Job(command, directory, Path("/dev/shm") / directory.name if memory else None) as job:
            if job.process.wait() != 0:
                raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{job.last_words()}")
            events = job.events.all()
    os.sync()
    return events


def in_turns(ways: Sequence[str], rounds: int, run: Callable[[str], Told]) -> Iterator[dict[str, Told]]:
    """Of each round, what every way has told; every second round goes backwards."""
    for number in range(rounds):
        told = {way: run(way) for way in (ways if number % 2 == 0 else ways[::-1])}
        yield {way: told[way] for way in ways}


def ratios(rounds: Sequence[Mapping[str, Sequence[float]]], base: str) -> dict[str, dict]:
    """By way, the seconds of the base divided by its own: of medians and of sums, for each round, and their medians.

    Args:
        rounds: of each, by way, seconds of its iterations.
        base: the way that the others are compared with.
    """
    told = {}
    for way in rounds[0]:
        by = {
            kind: [of(one[base]) / of(one[way]) for one in rounds] for kind, of in (("median", median), ("sum", mean))
        }
        told[way] = {kind: {"median": median(values), "rounds": values} for kind, values in by.items()}
    return told
