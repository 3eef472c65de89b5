"""When nodes are lost and come back: by chance, evenly, or as a recorded trace says."""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path


@dataclass(frozen=True)
class Event:
    """A change of what is there.

    Attributes:
        at_s: seconds since the start.
        lost: nodes that are gone.
        gained: nodes that are there again.
        after_s: where that is known, not ``at_s``: seconds since the event before, whatever happens meanwhile.
    """

    at_s: float
    lost: int = 0
    gained: int = 0
    after_s: float | None = None


@dataclass(frozen=True)
class Faults:
    """Where failures come from.

    Attributes:
        mtbf_s: mean seconds from one failure of the job to the next; None where a trace says when.
        evenly: exactly so many seconds, as failures that are injected on purpose, instead of a Poisson process.
        together: nodes that a failure takes at once, such as those behind one switch.
        trace: of :func:`read_trace`; it ends where the trace does.
        while_training: time runs for failures only while training advances, as in the closed form (MoEvement, section
            2.4), so that none hits a recovery but by ``after_s``.  What a failure cuts short has its time again where a
            trace says when: its moments are places in the run.

    Raises:
        ValueError: there is neither, or both.
    """

    mtbf_s: float | None = None
    evenly: bool = False
    together: int = 1
    trace: tuple[Event, ...] = ()
    while_training: bool = False

    def __post_init__(self):
        if (self.mtbf_s is None) == (not self.trace):
            raise ValueError("failures come either from an MTBF or from a trace: give one of them")
        if self.mtbf_s is not None and not self.mtbf_s > 0:
            raise ValueError(f"an MTBF of {self.mtbf_s} s is not possible: give one above 0")
        if self.together < 1:
            raise ValueError(f"a failure takes at least one node, not {self.together}")

    def events(self, rng: random.Random) -> Iterator[Event]:
        """In order of time; without end unless a trace says when."""
        if self.trace:
            return iter(self.trace)
        return self._drawn(rng)

    def _drawn(self, rng: random.Random) -> Iterator[Event]:
        at_s = 0.0
        if math.isinf(self.mtbf_s):
            return
        if self.evenly:
            # Failures at a fixed distance would meet every checkpoint interval that divides it at the same place.
            for number in itertools.count():
                yield Event((number + rng.random()) * self.mtbf_s, self.together)
        while True:
            at_s += rng.expovariate(1 / self.mtbf_s)
            yield Event(at_s, self.together)


def read_trace(path: str | Path) -> tuple[int, tuple[Event, ...]]:
    """A trace of spot instances.

    Two formats are known by their content (Bamboo, NSDI '23): lines ``milliseconds,add|remove,node``, and lines
    ``date, time, instances alive``.  Times count from the first line.

    Args:
        path: of the file.

    Returns:
        The nodes at the start, and how they change.

    Raises:
        ValueError: a line is of neither format, or time runs backwards; the message names the line.
    """
    with open(path, encoding="utf-8") as lines:
        rows = [(number, [cell.strip() for cell in row]) for number, row in enumerate(csv.reader(lines), 1) if row]
    if not rows:
        raise ValueError(f"the trace {path} is empty")
    named = len(rows[0][1]) == 3 and rows[0][1][1] in ("add", "remove")
    try:
        return _by_node(rows) if named else _by_count(rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


Rows = list[tuple[int, list[str]]]


def _by_node(rows: Rows) -> tuple[int, tuple[Event, ...]]:
    alive: set[str] = set()
    counts = []
    for number, cells in rows:
        if len(cells) != 3 or cells[1] not in ("add", "remove") or not cells[0].isdigit():
            raise ValueError(f"line {number} is not of the form milliseconds,add|remove,node")
        (alive.add if cells[1] == "add" else alive.discard)(cells[2])
        counts.append((number, int(cells[0]) / 1000, 1 if cells[1] == "add" else -1))
    start_s = counts[0][1]
    at_once = [change for _, at_s, change in counts if at_s == start_s]
    rest = [(number, at_s - start_s, change) for number, at_s, change in counts if at_s > start_s]
    _in_order(counts)
    events = []
    for at_s, changes in itertools.groupby(rest, key=lambda c: c[1]):
        changes = [change for _, _, change in changes]
        events.append(Event(at_s, lost=changes.count(-1), gained=changes.count(1)))
    return max(0, sum(at_once)), tuple(events)


def _by_count(rows: Rows) -> tuple[int, tuple[Event, ...]]:
    counts = []
    for number, cells in rows:
        try:
            day, time, alive = cells
            counts.append((number, datetime.fromisoformat(f"{day} {time}"), int(alive)))
        except ValueError:
            raise ValueError(
                f"line {number} is neither milliseconds,add|remove,node nor date, time, instances alive"
            ) from None
    _in_order(counts)
    start, events = counts[0][1], []
    for (_, _, before), (_, when, alive) in itertools.pairwise(counts):
        if alive != before:
            at_s = (when - start) / timedelta(seconds=1)
            events.append(Event(at_s, lost=max(0, before - alive), gained=max(0, alive - before)))
    return counts[0][2], tuple(events)


def _in_order(counts: Iterable[tuple]) -> None:
    for (_, before, _), (number, at, _) in itertools.pairwise(counts):
        if at < before:
            raise ValueError(f"line {number} is earlier than the line before it")
