"""Computes from its events how long a job paused for membership changes; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Pauses:
    """Median pauses in seconds; 0 without a membership change.

    Attributes:
        still_s: from the last iteration with the former members to the start of the first with the new ones, minus half
            an iteration: a change interrupts an iteration at its middle on average. It may include a rare wait for
            missing nodes.
        building_s: from the start of a node until the others stop to include it, minus their wait for more nodes.
    """

    still_s: float = 0.0
    building_s: float = 0.0


def pauses(events: Sequence[dict], came: Sequence[float], grow_wait_s: float, most: int) -> Pauses:
    """Returns the pauses of a job for membership changes.

    Args:
        events: events of the job, in order.
        came: start times of the nodes that joined later, in Unix seconds.
        grow_wait_s: the job's wait for more nodes, unless it has ``most``.
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
    """Yields each start after which an iteration completed, with the last iteration before and the first after it."""
    start, last, latest = None, None, None
    for event in events:
        if event["type"] == "start":
            start, last = event, latest
        elif event["type"] == "iteration":
            if start is not None:
                yield start, last or event, event
                start = None
            latest = event
