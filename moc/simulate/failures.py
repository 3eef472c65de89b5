"""When nodes are lost and come back: by chance, evenly, or as a recorded trace says."""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections.abc import Iterator, Sequence
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
        trace: events of :func:`read_trace`; it ends where the trace does.
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
        assert self.mtbf_s is not None  # or there is a trace
        return self._drawn(rng, self.mtbf_s)

    def _drawn(self, rng: random.Random, mtbf_s: float) -> Iterator[Event]:
        at_s = 0.0
        if math.isinf(mtbf_s):
            return
        if self.evenly:
            # Failures at a fixed distance would meet every checkpoint interval that divides it at the same place.
            for number in itertools.count():
                yield Event((number + rng.random()) * mtbf_s, self.together)
        while True:
            at_s += rng.expovariate(1 / mtbf_s)
            yield Event(at_s, self.together)


@dataclass(frozen=True)
class Trace:
    """What a recorded trace tells.

    Attributes:
        nodes: at the start.
        events: how they change.
        doubt: a sentence on lines that are not in order of time; empty where all are.
    """

    nodes: int
    events: tuple[Event, ...]
    doubt: str = ""


def read_trace(path: str | Path) -> Trace:
    """A trace of spot instances.

    Two formats are known by their content (Bamboo, NSDI '23): lines ``milliseconds,add|remove,node``, and lines
    ``date, time, instances alive``.  Times count from the earliest line.

    Where time steps back, lines of the first format are sorted: each is a change of its own.  In the second one each
    says how many there are, and the later line is right: Bamboo's recorder wrote what it saw for minutes ahead, and
    began anew when it saw something else before they had passed.  What stood there of times from there on is dropped.

    Args:
        path: of the file.

    Raises:
        ValueError: a line is of neither format; the message names it.
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


def _by_node(rows: Rows) -> Trace:
    changes = []
    for number, cells in rows:
        if len(cells) != 3 or cells[1] not in ("add", "remove") or not cells[0].isdigit():
            raise ValueError(f"line {number} is not of the form milliseconds,add|remove,node")
        changes.append((number, int(cells[0]) / 1000, 1 if cells[1] == "add" else -1))
    doubt = _doubt(changes, "lines were sorted")
    changes.sort(key=lambda change: change[1])
    start_s = changes[0][1]
    nodes = max(0, sum(change for _, at_s, change in changes if at_s == start_s))
    rest = [(at_s - start_s, change) for _, at_s, change in changes if at_s > start_s]
    events = []
    for at_s, together in itertools.groupby(rest, key=lambda one: one[0]):
        together = [change for _, change in together]
        events.append(Event(at_s, lost=together.count(-1), gained=together.count(1)))
    return Trace(nodes, tuple(events), doubt)


def _by_count(rows: Rows) -> Trace:
    counts = []
    for number, cells in rows:
        try:
            day, time, alive = cells
            counts.append((number, datetime.fromisoformat(f"{day} {time}"), int(alive)))
        except ValueError:
            raise ValueError(
                f"line {number} is neither milliseconds,add|remove,node nor date, time, instances alive"
            ) from None
    valid = []
    for count in counts:
        while valid and valid[-1][1] > count[1]:
            valid.pop()
        valid.append(count)
    doubt = _doubt(counts, f"{len(counts) - len(valid)} lines that told of later times were dropped")
    start, events = valid[0][1], []
    for (_, _, before), (_, when, alive) in itertools.pairwise(valid):
        if alive != before:
            at_s = (when - start) / timedelta(seconds=1)
            events.append(Event(at_s, lost=max(0, before - alive), gained=max(0, alive - before)))
    return Trace(valid[0][2], tuple(events), doubt)


def _doubt(rows: Sequence[tuple], done: str) -> str:
    """A sentence on the lines that are earlier than the one before them, and on what was done about it."""
    back = [number for (_, before, _), (number, at, _) in itertools.pairwise(rows) if at < before]
    if not back:
        return ""
    return f"{len(back)} of {len(rows)} lines are earlier than the line before them, line {back[0]} first: {done}."
