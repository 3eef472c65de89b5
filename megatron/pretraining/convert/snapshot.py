"""Reads and writes checkpoints of Format v1."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.pretraining.convert.contents import ConvertedState, Facts, count_elements, iteration_of
from megatron.pretraining.convert.regions import (
    Advance,
    cut,
    read_region,
    refuse_to_replace,
    whole_tensors,
    write_regions,
)
from moc.state.region import Region
from moc.store.durable import sync_directory
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest, OperatorEntry
from moc.store.regions import RegionReader
from moc.store.storage import LocalPlace
from moc.store.store import Store, directory_of, file_of


class SnapshotContents(ConvertedState):
    """A checkpoint of Format v1, by its ``iter_*`` directory.  Data are verified by their hashes when they are read.

    Raises:
        CheckpointError: the manifest or a header is damaged, or they contradict each other.
    """

    def __init__(self, directory: Path):
        directory = directory.resolve()
        store = Store(LocalPlace(directory.parent))
        manifest = store.manifest(iteration_of(directory))
        if not manifest.complete:
            raise CheckpointError(
                f"{directory} names {len(manifest.files)} of {manifest.writers} files: it is one node's part of a "
                "checkpoint; gather the files and manifests of all nodes first"
            )
        for name, entry in manifest.files.items():
            if damage := store.damage_in_header(manifest.iteration, name, entry):
                raise CheckpointError(damage)
        self._reader = RegionReader([directory / name for name in manifest.files], verify=True)
        _check_counts(manifest, self._reader)
        self.facts = Facts(manifest.iteration, manifest.policy, manifest.layout, manifest.state, len(manifest.files))
        self.operators = {name: (entry.detail, entry.step) for name, entry in manifest.operators.items()}
        self.tensors = whole_tensors(self._reader)

    def read(self, name: str, slot: str, region: Region) -> torch.Tensor:
        """Reads and verifies a box."""
        return read_region(self._reader, name, slot, region)


def _check_counts(manifest: Manifest, reader: RegionReader) -> None:
    held = count_elements(source.entry for source in reader.sources())
    for name in sorted({*manifest.operators, *held}):
        there = held.get(name, {})
        promised = dict(manifest.operators[name].elements) if name in manifest.operators else {}
        if there != promised:
            raise CheckpointError(f"files hold {there} elements of {name}, and the manifest says {promised}")


def write_snapshot(contents: ConvertedState, root: Path, writers: int, advance: Advance) -> Path:
    """Writes Format v1 into ``root``, in ``writers`` files whose sizes differ by at most their headers and one element.

    Raises:
        CheckpointError: the iteration is saved already, or another job uses the directory.
    """
    facts, store = contents.facts, Store(LocalPlace(root, patience=0.0))
    directory = root / directory_of(facts.iteration)
    store.place.lock()
    refuse_to_replace(directory)
    store.remove(facts.iteration)  # remains of a killed conversion
    directory.mkdir(parents=True)
    written, entries = {}, cut(contents.tensors, writers)
    for rank, part in enumerate(entries):
        written[file_of(rank)] = write_regions(directory / file_of(rank), part, contents, advance)
    sync_directory(directory)
    counts = count_elements(entry for part in entries for entry in part)
    operators = {
        name: OperatorEntry(detail, step, counts[name])
        for name, (detail, step) in contents.operators.items()
        if name in counts
    }
    store.publish(
        Manifest(facts.iteration, facts.policy, writers, written, operators, dict(facts.layout), dict(facts.state))
    )
    return directory
