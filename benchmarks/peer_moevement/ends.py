"""What a job has come to: its masters and moments at the end."""

from __future__ import annotations

from pathlib import Path

import numpy

from benchmarks.peer_moevement.figures import State
from moc.store.places import LocalPlace
from moc.store.regions import RegionReader
from moc.store.store import Store, directory_of


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
    """From what the first data-parallel worker of each stage wrote (``worker.py``)."""
    told = {}
    for path in sorted(directory.glob("stage_*.npz")):
        with numpy.load(path) as stage:
            told |= {tuple(key.rsplit("/", 1)): stage[key] for key in stage}
    return told
