"""Finds signs that two generations of a job trained or published at the same time; pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_BEGINS = ("generation", "resume", "start", "replay")


@dataclass(frozen=True)
class Life:
    """Observed lifetime of a worker."""

    rank: int
    host: int
    begin: float  # Unix seconds
    end: float  # Unix seconds of the last observation of the worker as running and not stopped


@dataclass(frozen=True)
class Publication:
    """A manifest that was observed for the first time, or with changed content."""

    time: float  # Unix seconds
    iteration: int  # iteration of the snapshot
    generation: int | None  # generation in the manifest, if any


def overlaps(lives: Sequence[Life]) -> list[tuple[int, float, float]]:
    """Returns the times when a rank lived on two hosts: rank, start and end."""
    found = []
    for i, one in enumerate(lives):
        for other in lives[i + 1 :]:
            begin, end = max(one.begin, other.begin), min(one.end, other.end)
            if one.rank == other.rank and one.host != other.host and begin < end:
                found.append((one.rank, begin, end))
    return found


def told_twice(events: Iterable[dict]) -> list[int]:
    """Returns the iterations reported after the same or a later one without an event of ``_BEGINS`` in between."""
    found, last = [], 0
    for event in events:
        if event["type"] in _BEGINS:
            last = 0
        elif event["type"] == "iteration":
            if event["iteration"] <= last:
                found.append(event["iteration"])
            last = event["iteration"]
    return found


def two_worlds(events: Sequence[dict], lives: Sequence[Life], publications: Sequence[Publication]) -> list[str]:
    """Returns all signs that two generations trained or published at the same time, one sentence each."""
    wrong = []
    if twice := told_twice(events):
        wrong.append(f"two generations reported iterations {twice[:5]}")
    for rank, begin, end in overlaps(lives):
        during = [e["iteration"] for e in events if e["type"] == "iteration" and begin < e["time"] < end]
        published = [p.iteration for p in publications if begin < p.time < end]
        if during or published:
            shown = f"told {during[:5]}, published {published[:5]}"
            wrong.append(f"rank {rank} lived twice for {end - begin:.1f} s; {shown}")
    known = [(one.generation, one.iteration) for one in publications if one.generation is not None]
    for (before, _), (after, iteration) in zip(known, known[1:], strict=False):
        if after < before:
            wrong.append(f"generation {after} after generation {before} published iteration {iteration}")
    return wrong
