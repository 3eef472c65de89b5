"""How long a job stood still when its members changed, from what it told; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Pauses:
    """Seconds, medians; 0 if nothing of the kind happened.

    Attributes:
        still_s: from the last iteration with former members to the begin of the first with others, less half an
            iteration, which a change costs on average since it comes at any moment of one.  It may include a wait for
            nodes that are missing, which is rare.
        building_s: from the start of a node until the others stop to take it in, less what they wait for more nodes.
    """

    still_s: float = 0.0
    building_s: float = 0.0


def pauses(events: Sequence[dict], came: Sequence[float], grow_wait_s: float, most: int) -> Pauses:
    """What changes of members have cost a job.

    Args:
        events: of the job, in order.
        came: when nodes were started after the first ones, in Unix seconds.
        grow_wait_s: that the job waits for more nodes unless ``most`` are there.
        most: MAX.
    """
    still, building, before, workers = [], [], None, 0
    for start, last, first in _changes(events):
        began = first["time"] - first["elapsed_s"]
        if before is not None:
            still.append(began - last["time"] - first["elapsed_s"] / 2)
            waited = [last["time"] - at for at in came if before <= at < last["time"]]
            if start["world_size"] > workers and waited:
                building.append(min(waited) - (grow_wait_s if start["world_size"] < most else 0.0))
        before, workers = began, start["world_size"]
    return Pauses(*(max(0.0, median(values)) if values else 0.0 for values in (still, building)))


def _changes(events: Sequence[dict]):
    """Each start after which an iteration was completed, with the last one before it and the first one after it."""
    start, last, latest = None, None, None
    for event in events:
        if event["type"] == "start":
            start, last = event, latest
        elif event["type"] == "iteration":
            if start is not None:
                yield start, last or event, event
                start = None
            latest = event
