"""Reads measurements of a run from its ``events.jsonl``, to replace a cluster's data-sheet figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from moc.errors import code_of
from moc.files.event_log import events_file, read_events
from moc.simulate.errors import SimulationError
from moc.simulate.recoveries import Recovered, recovered, stretches

_WARM_UP = 5  # iterations that allocate memory and connect


@dataclass(frozen=True)
class Profile:
    """Measurements of one run: medians, unless noted.

    Attributes:
        iteration_s: seconds of an iteration without a snapshot; if all had one, less their stalls.
        world: workers.
        host_bandwidth: bytes per second from one worker to host memory; None without snapshots.
        storage_bandwidth: bytes per second of all workers to storage; None if nothing was written.
        snapshot_bytes: of one snapshot, over all workers; None without snapshots.
        mean_iteration_s: mean seconds of an iteration outside recoveries, including saving.
        usable_s: from the end of an iteration until its snapshot is usable: copied, hashed and, with the disk tier,
            written; 0 without snapshots.
        recoveries: the parts of each recovery.
    """

    iteration_s: float
    world: int
    host_bandwidth: float | None = None
    storage_bandwidth: float | None = None
    snapshot_bytes: float | None = None
    mean_iteration_s: float = 0.0
    usable_s: float = 0.0
    recoveries: tuple[Recovered, ...] = ()


def read_profile(path: str | Path) -> Profile:
    """Reads ``events.jsonl``, given the file or its directory.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no event log, or has too few iterations.
    """
    events = read_events(path)
    try:
        return profile_of(events)
    except ValueError as error:
        raise SimulationError(f"{events_file(path)}: {error}", code=code_of(error)) from None


def profile_of(events: Iterable[Mapping]) -> Profile:
    """Returns the profile of the events of a run, or of a part of it.

    Raises:
        ValueError: there are too few iterations.
    """
    events = list(events)
    lost = list(stretches(events))
    unsettled = {id(event) for stretch in lost for event in stretch}
    world, iterations, disturbed, stalled_s = 1, [], set(), 0.0
    copies, seals, writes, written_s, sizes = [], [], [], [], []
    for event in events:
        kind, iteration = event.get("type"), event.get("iteration")
        if kind == "start":
            world = event.get("world_size", world)
        elif kind == "iteration":
            if event.get("elapsed_s") and id(event) not in unsettled:
                iterations.append((event["iteration"], event["elapsed_s"], stalled_s))
            stalled_s = 0.0
        elif kind == "stall":
            disturbed.update((iteration, None if iteration is None else iteration + 1))
            stalled_s += event["seconds"]
        elif kind == "snapshot" and event.get("copy_s"):
            copies.append(event["bytes"] / world / event["copy_s"])
            seals.append(event["copy_s"] + event.get("hash_s", 0.0))
            sizes.append(event["bytes"])
            disturbed.update((event["iteration"], event["iteration"] + 1))
        elif kind == "persist" and event.get("write_s"):
            writes.append(event["bytes"] / event["write_s"])
            written_s.append(event["write_s"])
    first = min(iterations, default=(0,))[0] + _WARM_UP
    settled = [one for one in iterations if one[0] >= first]
    if not settled:
        raise SimulationError(
            f"there are no iterations after the first {_WARM_UP}. Fix: profile a longer run",
            code="run-too-short",
        )
    quiet = [seconds for at, seconds, _ in settled if at not in disturbed]
    quiet = quiet or [seconds - waited for _, seconds, waited in settled]
    in_storage = {event.get("tier") for event in events if event.get("type") == "snapshot"} == {"disk"}
    mean_s = fmean(seconds for _, seconds, _ in settled)
    return Profile(
        iteration_s=median(quiet),
        world=world,
        host_bandwidth=_median(copies),
        storage_bandwidth=_median(writes),
        snapshot_bytes=_median(sizes),
        mean_iteration_s=mean_s,
        usable_s=(_median(seals) or 0.0) + (in_storage and _median(written_s) or 0.0),
        recoveries=tuple(filter(None, (recovered(stretch, mean_s) for stretch in lost))),
    )


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
