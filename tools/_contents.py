"""What a checkpoint to convert holds, whichever its format: tensors of the unpartitioned model, read when needed."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from _coverage import PARAM, operator_or_other

from moc.state.region import Region
from moc.store.errors import CheckpointError
from moc.store.manifest import Manifest
from moc.store.places import LocalPlace
from moc.store.regions import Entry, MissingRegionError, RegionReader
from moc.store.store import Store

MASTER, FULL, COMPUTE = "master", "full", "compute"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Facts:
    """What is no tensor.

    Attributes:
        iteration: iterations completed.
        policy: name of the policy that asked for the checkpoint.
        layout: sizes of the layout that wrote it, for people.
        state: position, schedule, loss scale, shape of the model, order of samples; see ``training_state.json``.
        writers: number of files that hold its regions.
    """

    iteration: int
    policy: str
    layout: Mapping[str, int]
    state: Mapping[str, object]
    writers: int


class Contents(ABC):
    """Tensors of the unpartitioned model.

    Attributes:
        facts: what is no tensor.
        tensors: every slot of every tensor, as a whole.
        operators: detail (``full``, ``compute``) and number of updates of every operator.
    """

    facts: Facts
    tensors: list[Entry]
    operators: dict[str, tuple[str, int | None]]

    @abstractmethod
    def read(self, name: str, slot: str, region: Region) -> torch.Tensor:
        """The values of a box, on the host; a CheckpointError where they are missing or damaged."""

    def weights(self, dtype: torch.dtype | None) -> Contents:
        """The weights that a model computes with, alone: masters are rounded to ``dtype``, if there are any."""
        return Weights(self, dtype)

    def slots(self) -> dict[str, dict[str, Entry]]:
        """The tensors, by name and slot."""
        found: dict[str, dict[str, Entry]] = defaultdict(dict)
        for tensor in self.tensors:
            found[tensor.name][tensor.slot] = tensor
        return dict(found)


class Weights(Contents):
    """The compute weights of other contents; see :meth:`Contents.weights`.

    Raises:
        CheckpointError: masters have to be rounded, and it is not known to what.
    """

    def __init__(self, whole: Contents, dtype: torch.dtype | None):
        self._whole, self.tensors = whole, []
        self._rounded: dict[str, torch.dtype] = {}
        for name, slots in whole.slots().items():
            kept = slots.get(MASTER, slots.get(PARAM))
            if kept is None:
                raise CheckpointError(f"there is {min(slots)} of {name}, but no weight: this is no whole checkpoint")
            if kept.slot == MASTER:
                if dtype is None:
                    raise CheckpointError(
                        "the checkpoint does not say what dtype its model computes with (params_dtype): pass --dtype"
                    )
                self._rounded[name] = dtype
                kept = replace(kept, slot=PARAM, dtype=dtype)
            self.tensors.append(kept)
        self.facts = replace(whole.facts, state=dict(whole.facts.state) | {"optimizer": None})
        self.operators = {name: (COMPUTE, None) for name in whole.operators}

    def read(self, name: str, slot: str, region: Region) -> torch.Tensor:
        """See :class:`Contents`."""
        if name not in self._rounded:
            return self._whole.read(name, slot, region)
        return self._whole.read(name, MASTER, region).to(self._rounded[name])


class SnapshotContents(Contents):
    """A checkpoint of Format v1.  Its data are compared with their hashes when they are read.

    Args:
        directory: its ``iter_*`` directory.

    Raises:
        CheckpointError: manifest or a header is damaged, or they contradict each other.
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
        """See :class:`Contents`."""
        return read_region(self._reader, name, slot, region)


def iteration_of(directory: Path) -> int:
    """The number in the name of a checkpoint's directory.

    Raises:
        CheckpointError: it is named otherwise.
    """
    found = re.fullmatch(r"iter_(\d{7,})", directory.resolve().name)
    if not found:
        raise CheckpointError(f"{directory} is not called iter_ and a number: give it the name that it was saved by")
    return int(found[1])


def whole_tensors(reader: RegionReader) -> list[Entry]:
    """Every slot of every tensor that region files hold some of, in model order.

    Raises:
        CheckpointError: files contradict each other about a tensor.
    """
    found: dict[tuple[str, str], Entry] = {}
    for source in reader.sources():
        part = source.entry
        whole = Entry(part.name, part.slot, part.global_shape, whole_of(part.global_shape), part.dtype)
        if found.setdefault((part.name, part.slot), whole) != whole:
            raise CheckpointError(f"{source.blob.name} contradicts other files about shape or dtype of {part.name}")
    return sorted(found.values(), key=lambda entry: (_place_in_model(entry.name), entry.slot != MASTER, entry.slot))


def read_region(reader: RegionReader, name: str, slot: str, region: Region) -> torch.Tensor:
    """A box from region files; a CheckpointError where they do not hold it."""
    try:
        return reader.get(name, slot, region)
    except MissingRegionError as missing:
        raise CheckpointError(f"{missing}: tools/verify_checkpoint.py tells what else is wrong") from None


def whole_of(shape: tuple[int, ...]) -> Region:
    """The box that is all of a tensor."""
    return Region((0,) * len(shape), shape)


def count_elements(entries: Iterable[Entry]) -> dict[str, dict[str, int]]:
    """How many elements of each slot there are, by operator."""
    counts: dict[str, Counter] = defaultdict(Counter)
    for entry in entries:
        counts[operator_or_other(entry.name)][entry.slot] += entry.region.numel
    return {operator: dict(slots) for operator, slots in counts.items()}


def _check_counts(manifest: Manifest, reader: RegionReader) -> None:
    held = count_elements(source.entry for source in reader.sources())
    for name in sorted({*manifest.operators, *held}):
        there = held.get(name, {})
        promised = dict(manifest.operators[name].elements) if name in manifest.operators else {}
        if there != promised:
            raise CheckpointError(f"files hold {there} elements of {name}, and the manifest says {promised}")


def _place_in_model(name: str) -> tuple:
    """Embedding, layers by number, output; within a layer as names are ordered, experts by number."""
    outside = 0 if name.startswith("embedding.") else 1 if name.startswith("decoder.layers.") else 2
    return outside, [int(number) for number in _NUMBER.findall(name)[:1]], _NUMBER.sub(lambda n: n[0].zfill(9), name)
