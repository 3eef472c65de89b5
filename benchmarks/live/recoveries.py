"""Computes recovery times from the events and output of a job; pure functions.

Times are Unix seconds of one machine: of the kill, of events in ``events.jsonl``, and of the arrival of a line of the
launcher's output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median

NOTICED = {"ours": re.compile("mocrun: generation [0-9]+: "), "torchrun": re.compile(r"failed \(exitcode: -9\)")}
"""Pattern of the line that reports a lost worker, by launcher."""
CHAIN = ("detected", "survivors unblocked", "first collective", "planned", "loaded", "first iteration")
"""Steps of a recovery, each measured in seconds after the kill."""
OUTSIDE = "outside useful work"
CLAIMS = {  # name: predicate of the medians of cases
    "detection under 0.2 s": lambda of: of["ours, memory"]["detected"] < 0.2,
    "first collective under 1 s": lambda of: of["ours, memory"]["first collective"] < 1.0,
    "at least 10 times less than torchrun, disk": lambda of: (
        of["torchrun, disk"][OUTSIDE] >= 10 * of["ours, memory"][OUTSIDE]
    ),
    "gradients take at most 1.2 times as long as everything in memory": lambda of: (
        of["ours, gradients"][OUTSIDE] <= 1.2 * of["ours, memory"][OUTSIDE]
    ),
    "gradients take at most 0.6 of what windows take": lambda of: (
        of["ours, gradients"][OUTSIDE] <= 0.6 * of["ours, windows"][OUTSIDE]
    ),
}


def recovery(
    events: Sequence[dict], said: Sequence[tuple[float, str]], noticed: re.Pattern, killed: float, usual: float
) -> dict | None:
    """Measures the recovery from a kill.

    Args:
        events: events of the job, in order.
        said: lines of the launcher, with their times.
        noticed: one of :data:`NOTICED`.
        killed: time of the kill.
        usual: seconds of an iteration without a kill.

    Returns:
        Seconds from the kill to each step of :data:`CHAIN`, ``outside useful work``, and ``iterations again``: the
        number of repeated iterations.  *survivors unblocked* is missing unless the first worker, which reports it,
        survived.  None if the recovery is not over.
    """
    found = first_new(events, killed)
    line = next((moment for moment, text in said if moment >= killed and noticed.search(text)), None)
    start = next((e for e in events if e["type"] == "start" and e["time"] >= killed), None)
    if found is None or line is None or start is None:
        return None
    resumed, last, new = found
    again = next(e for e in events[resumed:] if e["type"] == "iteration")
    left = next((e["time"] - e["met_s"] for e in events if e["type"] == "generation" and e["time"] >= killed), None)
    moments = {
        "detected": line,
        "survivors unblocked": left,
        "first collective": start["time"] - start["startup_s"]["load"],
        "planned": events[resumed]["time"] - events[resumed]["seconds"],
        "loaded": events[resumed]["time"],
        "first iteration": again["time"],
    }
    told = {name: moment - killed for name, moment in moments.items() if moment is not None}
    computed_again = last["iteration"] - events[resumed]["iteration"]
    return told | {OUTSIDE: new["time"] - last["time"] - usual, "iterations again": computed_again}


def first_new(events: Sequence[dict], killed: float) -> tuple[int, dict, dict] | None:
    """Returns the index of the event ``resume`` after a kill, the newest iteration before it, and the next new one."""
    resumed = next((i for i, e in enumerate(events) if e["type"] == "resume" and e["time"] >= killed), None)
    if resumed is None:
        return None
    before, after = ([e for e in part if e["type"] == "iteration"] for part in (events[:resumed], events[resumed:]))
    last = max(before, key=lambda e: (e["iteration"], -e["time"]))
    new = next((e for e in after if e["iteration"] > last["iteration"]), None)
    return None if new is None else (resumed, last, new)


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each figure, over the kills that have it."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: median(sample[name] for sample in samples if name in sample) for name in names}


def claims(of: Mapping[str, Mapping[str, float]]) -> dict[str, bool]:
    """Returns whether each claim holds by the medians of cases; only claims whose cases were run."""
    told = {}
    for name, holds in CLAIMS.items():
        with suppress(KeyError):
            told[name] = holds(of)
    return told
