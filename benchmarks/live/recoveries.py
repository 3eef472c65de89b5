"""From what a job has told to how long it stood still; pure functions.

Moments are Unix seconds of one machine: the kill's own, those of ``events.jsonl``, and when a line of the launcher's
output arrived.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median

NOTICED = {"ours": re.compile("mocrun: generation [0-9]+: "), "torchrun": re.compile(r"failed \(exitcode: -9\)")}
"""By launcher, the line by which it says that a worker is lost."""
CHAIN = ("detected", "survivors unblocked", "first collective", "planned", "loaded", "first iteration")
"""What follows a kill, each in seconds after it."""
OUTSIDE = "outside useful work"
CLAIMS = {  # name: (seconds or ratio, how it is meant)
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
    """What followed a kill.

    Args:
        events: of the job, in order.
        said: lines of the launcher, with their moments.
        noticed: one of :data:`NOTICED`.
        killed: moment of the kill.
        usual: seconds of an iteration without a kill.

    Returns:
        Seconds after the kill of what :data:`CHAIN` lists (*survivors unblocked* only where the first worker lived on,
        which tells it), ``outside useful work``, and ``iterations again``, which had been complete already.  None if
        the job has not come so far.
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
    """After a kill, the place of the event ``resume``; the newest iteration before; the first one that is newer."""
    resumed = next((i for i, e in enumerate(events) if e["type"] == "resume" and e["time"] >= killed), None)
    if resumed is None:
        return None
    before, after = ([e for e in part if e["type"] == "iteration"] for part in (events[:resumed], events[resumed:]))
    last = max(before, key=lambda e: (e["iteration"], -e["time"]))
    new = next((e for e in after if e["iteration"] > last["iteration"]), None)
    return None if new is None else (resumed, last, new)


def medians(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure, over the kills for which there is one."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: median(sample[name] for sample in samples if name in sample) for name in names}


def claims(of: Mapping[str, Mapping[str, float]]) -> dict[str, bool]:
    """Which claims hold, of those whose cases were run, by medians of cases."""
    told = {}
    for name, holds in CLAIMS.items():
        with suppress(KeyError):
            told[name] = holds(of)
    return told
