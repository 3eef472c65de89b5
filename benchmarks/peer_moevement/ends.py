"""What a job has come to: its masters and moments at the end."""

from __future__ import annotations

from pathlib import Path

import numpy

from benchmarks.peer_moevement.figures import State
from moc.store.regions import RegionReader
from moc.store.storage import LocalPlace
from moc.store.store import Store, directory_of

SLOTS = ("master", "exp_avg", "exp_avg_sq")


def our_end(snapshots: Path, iteration: int) -> State:
    """From the last snapshot, which is of everything; pieces of parameters as workers hold them.

    Raises:
        CheckpointError: it is not there.
    """
    store = Store(LocalPlace(snapshots))
    names = store.manifest(iteration).files
    reader = RegionReader(store.place.blob(f"{directory_of(iteration)}/{name}") for name in names)
    pieces = ((source.entry, source.values()) for source in reader.sources())
    return {(e.name, f"{e.slot} {e.region.offset} {e.region.shape}"): values.numpy().copy() for e, values in pieces}


def public_end(directory: Path) -> State:
    """From what the workers wrote (``worker.py``): their flat parts put together, and cut into parameters."""
    workers = []
    for path in directory.glob("rank_*.npz"):
        with numpy.load(path) as file:
            workers.append(dict(file))
    told = {}
    for stage in sorted({int(worker["stage"]) for worker in workers}):
        mine = [worker for worker in workers if worker["stage"] == stage]
        mine.sort(key=lambda worker: int(worker["data_rank"]))
        for group in sorted({key.partition("/")[0] for key in mine[0] if "/" in key}):
            names, ends = mine[0][f"{group}/names"], numpy.cumsum(mine[0][f"{group}/sizes"])
            for slot in SLOTS:
                whole = numpy.concatenate([worker[f"{group}/{slot}"] for worker in mine])
                pieces = numpy.split(whole, ends)  # the last one is padding
                told |= {(str(name), slot): piece for name, piece in zip(names, pieces, strict=False)}
    return told
