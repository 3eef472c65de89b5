"""Generates losses and returns of nodes: random, evenly spaced, or from a recorded trace."""

from __future__ import annotations

import csv
import itertools
import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from moc.files.safe_directory import MAX_MANIFEST_BYTES, open_user_file
from moc.simulate import SimulationError

_NUMBER = re.compile(r"[0-9]{1,15}")
"""Pattern of a number in a trace."""


@dataclass(frozen=True)
class ClusterEvent:
    """Loss or return of nodes, ``at_s`` seconds after the start or, if given, ``after_s`` after the last event."""

    at_s: float
    lost: int = 0
    gained: int = 0
    after_s: float | None = None


@dataclass(frozen=True)
class Faults:
    """Source of failures.

    Attributes:
        mtbf_s: mean seconds between failures of the job; None with a trace.
        evenly: one failure in each MTBF, as for injected faults, instead of a Poisson process.
        together: nodes lost together in a failure, such as the nodes behind one switch.
        trace: events of :func:`read_trace`; failures end with the trace.
        while_training: failure time advances only during training, as in the closed form (MoEvement, section 2.4), so
            that only events with ``after_s`` fall into a recovery.  With a trace, the time of an interrupted iteration
            counts again, since the trace's times are positions in the run.

    Raises:
        ValueError: neither MTBF nor trace is given, or both.
    """

    mtbf_s: float | None = None
    evenly: bool = False
    together: int = 1
    trace: tuple[ClusterEvent, ...] = ()
    while_training: bool = False

    def __post_init__(self):
        if (self.mtbf_s is None) == (not self.trace):
            raise SimulationError(
                "failures have either an MTBF or a trace as their source. Fix: give one of them",
                code="flags-exclude-each-other",
            )
        if self.mtbf_s is not None and not self.mtbf_s > 0:
            raise SimulationError(
                f"an MTBF of {self.mtbf_s} s is not possible. Fix: give one above 0",
                code="value-out-of-range",
            )
        if self.together < 1:
            raise SimulationError(
                f"a failure cannot take {self.together} nodes. Fix: give 1 or more",
                code="value-out-of-range",
            )

    def events(self, rng: random.Random) -> Iterator[ClusterEvent]:
        """Yields the events in order of time; endless unless they are from a trace."""
        yield from self.trace
        if self.mtbf_s is None or math.isinf(self.mtbf_s):
            return
        at_s = 0.0
        for number in itertools.count():
            if self.evenly:
                # failures at a fixed distance would hit every checkpoint interval that divides it at the same point
                at_s = (number + rng.random()) * self.mtbf_s
            else:
                at_s += rng.expovariate(1 / self.mtbf_s)
            yield ClusterEvent(at_s, self.together)


@dataclass(frozen=True)
class Trace:
    """Recorded trace: nodes at the start, changes, and a sentence on lines out of order (empty if there are none)."""

    nodes: int
    events: tuple[ClusterEvent, ...]
    doubt: str = ""


def read_trace(path: str | Path) -> Trace:
    """Reads a trace of spot instances.

    Two formats are recognized by content (Bamboo, NSDI '23): lines ``milliseconds,add|remove,node``, and lines
    ``date, time, instances alive``.  Times count from the earliest line.

    If time steps back, lines of the first format are sorted, since each is a separate change.  A line of the second
    format is a total, and the later line is right.  Bamboo's recorder wrote its observation for minutes ahead, and
    started over when it observed a change before they had passed.  Earlier lines about later times are dropped.

    Raises:
        ValueError: a line has neither format; the message names it.
    """
    with open(open_user_file(path, MAX_MANIFEST_BYTES), encoding="utf-8") as lines:
        numbered = enumerate(csv.reader(lines), 1)
        rows = ((number, [cell.strip() for cell in row]) for number, row in numbered if row)
        try:
            if (first := next(rows, None)) is None:
                raise SimulationError(
                    f"the trace {path} is empty. Fix: give a trace with at least one line", code="trace-invalid"
                )
            cells, rows = first[1], itertools.chain([first], rows)
            return _by_node(rows) if len(cells) == 3 and cells[1] in ("add", "remove") else _by_count(rows)
        except (csv.Error, UnicodeDecodeError) as error:
            raise SimulationError(
                f"{path} is not a trace ({error}). Fix: give a text file", code="trace-invalid"
            ) from None
        except SimulationError:
            raise
        except ValueError as error:
            raise SimulationError(
                f"{path}: {error}. Fix: correct the line, or give another trace", code="trace-invalid"
            ) from None


Rows = Iterable[tuple[int, list[str]]]


def _by_node(rows: Rows) -> Trace:
    changes = []
    for number, cells in rows:
        if len(cells) != 3 or cells[1] not in ("add", "remove") or not _NUMBER.fullmatch(cells[0]):
            raise ValueError(f"line {number} is not of the form milliseconds,add|remove,node")
        changes.append((number, int(cells[0]) / 1000, 1 if cells[1] == "add" else -1))
    doubt = _doubt(changes, "lines were sorted")
    changes.sort(key=lambda change: change[1])
    start_s = changes[0][1]
    nodes = max(0, sum(change for _, at_s, change in changes if at_s == start_s))
    remaining = [(at_s - start_s, change) for _, at_s, change in changes if at_s > start_s]
    events = []
    for at_s, together in itertools.groupby(remaining, key=lambda change: change[0]):
        together = [change for _, change in together]
        events.append(ClusterEvent(at_s, lost=together.count(-1), gained=together.count(1)))
    return Trace(nodes, tuple(events), doubt)


def _by_count(rows: Rows) -> Trace:
    alive_nodes = []
    for number, cells in rows:
        try:
            day, time, alive = cells
            at = datetime.fromisoformat(f"{day} {time}")
            if at.tzinfo is not None or not _NUMBER.fullmatch(alive):
                raise ValueError
            alive_nodes.append((number, at, int(alive)))
        except ValueError:
            raise ValueError(
                f"line {number} is neither milliseconds,add|remove,node nor date, time, instances alive"
            ) from None
    valid = []
    for count in alive_nodes:
        while valid and valid[-1][1] > count[1]:
            valid.pop()
        valid.append(count)
    doubt = _doubt(alive_nodes, f"{len(alive_nodes) - len(valid)} lines with later times were dropped")
    start, events = valid[0][1], []
    for (_, _, before), (_, count_time, alive) in itertools.pairwise(valid):
        if alive != before:
            at_s = (count_time - start) / timedelta(seconds=1)
            events.append(ClusterEvent(at_s, lost=max(0, before - alive), gained=max(0, alive - before)))
    return Trace(valid[0][2], tuple(events), doubt)


def _doubt(rows: Sequence[tuple], consequence: str) -> str:
    """Returns a sentence on lines that are earlier than the line before them, and how they were handled."""
    back = [number for (_, before, _), (number, at, _) in itertools.pairwise(rows) if at < before]
    if not back:
        return ""
    return (
        f"{len(back)} of {len(rows)} lines are earlier than the line before them, line {back[0]} first: {consequence}."
    )
