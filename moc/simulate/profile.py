"""What a run has measured, from its ``events.jsonl``: instead of what a cluster's sheet says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

_WARM_UP = 5  # iterations that allocate and connect


@dataclass(frozen=True)
class Profile:
    """Medians of one run.

    Attributes:
        iteration_s: seconds of an iteration in which nothing was saved.
        world: workers.
        host_bandwidth: bytes per second from one worker to host memory; None without snapshots.
        storage_bandwidth: bytes per second of all workers to storage; None if nothing was written.
        snapshot_bytes: of one snapshot, all workers'; None without.
    """

    iteration_s: float
    world: int
    host_bandwidth: float | None = None
    storage_bandwidth: float | None = None
    snapshot_bytes: float | None = None


def read_profile(path: str | Path) -> Profile:
    """Reads ``events.jsonl``.

    Args:
        path: of the file, or of the directory that it is in.

    Raises:
        ValueError: it is no such file, or tells of too few iterations.
    """
    path = Path(path)
    path = path / "events.jsonl" if path.is_dir() else path
    world, iterations, disturbed = 1, {}, set()
    copies, writes, sizes = [], [], []
    for event in _events(path):
        kind, iteration = event.get("type"), event.get("iteration")
        if kind == "start":
            world = event.get("world_size", world)
        elif kind == "iteration" and event.get("elapsed_s"):
            iterations[iteration] = event["elapsed_s"]
        elif kind == "stall":
            disturbed.update((iteration, None if iteration is None else iteration + 1))
        elif kind == "snapshot" and event.get("copy_s"):
            copies.append(event["bytes"] / world / event["copy_s"])
            sizes.append(event["bytes"])
            disturbed.update((iteration, iteration + 1))
        elif kind == "persist" and event.get("write_s"):
            writes.append(event["bytes"] / event["write_s"])
    first = min(iterations, default=0) + _WARM_UP
    quiet = [seconds for at, seconds in iterations.items() if at >= first and at not in disturbed]
    quiet = quiet or [seconds for at, seconds in iterations.items() if at >= first]
    if not quiet:
        raise ValueError(f"{path} tells of no iterations after the first {_WARM_UP}: profile a longer run")
    return Profile(median(quiet), world, _median(copies), _median(writes), _median(sizes))


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def _events(path: Path) -> Iterator[Mapping]:
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
            except ValueError:
                raise ValueError(f"line {number} of {path} is no JSON: is that an events.jsonl?") from None
            if isinstance(event, dict):
                yield event
