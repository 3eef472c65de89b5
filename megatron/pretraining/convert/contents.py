"""Reads the contents of a checkpoint of any format on demand, as tensors of the unpartitioned model.

Also reads and writes region files, which hold all of Format v1 and the optimizer state of dense checkpoints.
"""

from __future__ import annotations

import math
import os
import re
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moc.errors import cause_of, code_of
from moc.inspect.coverage import PARAM, missing_operators, operator_or_other, required_slots
from moc.policy import is_window_policy
from moc.session.digests import name_operators
from moc.state.digests import MASK, ChunkDigest, Key, differing_operators, digest_slot, to_text
from moc.state.operators import MODULE_STATE, Detail, Region, is_module_state, regions_of_range
from moc.store import store
from moc.store.dense_files import state_error
from moc.store.errors import CheckpointError
from moc.store.manifest import FileEntry
from moc.store.shard_file import FileLayout, MissingTensorError, ShardReader, TensorBox, write_values

MASTER, FULL, COMPUTE = "master", "full", "compute"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
WITH_FLAGS = "give the flags of the run behind --, to replay the window that this snapshot is part of"


@dataclass(frozen=True)
class Facts:
    """Part of a checkpoint that is not tensors.

    Attributes:
        iteration: iterations completed.
        policy: name of the policy that planned the checkpoint.
        layout: sizes of the layout that wrote it, for information.
        state: position, schedule, loss scale, model, tokenizer, sample order; see ``training_state.json``.
        writers: number of files that contain its chunks.
    """

    iteration: int
    policy: str
    layout: Mapping[str, int]
    state: Mapping[str, Any]
    writers: int


class ConvertedState(ABC):
    """Tensors of the unpartitioned model.

    Attributes:
        tensors: every optimizer-state key of every tensor, unsharded.
        operators: state subset (``full``, ``compute``) and number of updates of each operator.
        digests: digests of the saved state (:mod:`moc.state.digests`), for operators whose state is complete.
    """

    facts: Facts
    tensors: list[TensorBox]
    operators: dict[str, tuple[str, int | None]]
    digests: Mapping[Key, int] = {}

    @abstractmethod
    def read(self, name: str, slot: str, region: Region) -> torch.Tensor:
        """Returns the values of a chunk on the host; raises CheckpointError if they are missing or damaged."""

    def weights(self, dtype: torch.dtype | None) -> ConvertedState:
        """Returns only the compute weights; masters are rounded to ``dtype``."""
        return Weights(self, dtype)

    def stored(self) -> Iterable[TensorBox]:
        """Yields all stored tensors, including weights that follow from their masters."""
        return self.tensors

    def slots(self) -> dict[str, dict[str, TensorBox]]:
        """Returns the tensors by name and optimizer-state key."""
        slots: dict[str, dict[str, TensorBox]] = defaultdict(dict)
        for tensor in self.tensors:
            slots[tensor.name][tensor.slot] = tensor
        return dict(slots)


class Weights(ConvertedState):
    """Compute weights of other contents; see :meth:`ConvertedState.weights`.

    Raises:
        CheckpointError: masters must be rounded, and the dtype is unknown; or a tensor has no weight.
    """

    def __init__(self, source: ConvertedState, dtype: torch.dtype | None):
        self._source, self.tensors, self.digests = source, [], source.digests
        self._rounded: dict[str, torch.dtype] = {}
        for name, slots in source.slots().items():
            if name.startswith(MODULE_STATE):  # bytes of a rank's user modules, which no other format has
                continue
            tensor = slots.get(MASTER, slots.get(PARAM))
            if tensor is None:
                raise CheckpointError(
                    f"there is {min(slots)} of {name}, but no weight. Fix: convert another checkpoint with --iteration",
                    code="checkpoint-incomplete",
                )
            if tensor.slot == MASTER:
                if dtype is None:
                    raise CheckpointError(
                        "the checkpoint does not name the dtype of its model (params_dtype). Fix: pass --dtype",
                        code="dtype-missing",
                    )
                self._rounded[name] = dtype
                tensor = replace(tensor, slot=PARAM, dtype=dtype)
            self.tensors.append(tensor)
        self.facts = replace(source.facts, state=dict(source.facts.state) | {"optimizer": None})
        self.operators = {name: (COMPUTE, None) for name in source.operators}

    def read(self, name: str, slot: str, region: Region) -> torch.Tensor:
        """Reads a chunk; rounds masters."""
        if name not in self._rounded:
            return self._source.read(name, slot, region)
        return self._source.read(name, MASTER, region).to(self._rounded[name])


def iteration_of(directory: Path) -> int:
    """Returns the number in the name of a checkpoint's directory; raises CheckpointError for other names."""
    iteration = store.parse_iteration(directory.resolve().name)
    if iteration is None:
        raise CheckpointError(
            f"{directory} is not called iter_ and a number. Fix: give it the name that it was saved by",
            code="checkpoint-renamed",
        )
    return iteration


def complete_bounds(shape: tuple[int, ...]) -> Region:
    """Returns the chunk bounds of a complete tensor."""
    return Region((0,) * len(shape), shape)


def count_elements(entries: Iterable[TensorBox]) -> dict[str, dict[str, int]]:
    """Returns the number of elements by operator and optimizer-state key."""
    counts: dict[str, Counter] = defaultdict(Counter)
    for entry in entries:
        counts[operator_or_other(entry.name)][entry.slot] += entry.region.numel
    return {operator: dict(slots) for operator, slots in counts.items()}


def shape_by_operator(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Returns the number of parameters of each operator, which describes a model in a training state."""
    counts: Counter[str] = Counter()
    for name, shape in shapes.items():
        if not is_module_state(name):
            counts[operator_or_other(name)] += math.prod(shape)
    return dict(counts)


def check_complete(contents: ConvertedState) -> None:
    """Raises CheckpointError unless the model is complete, with all or none of its optimizer state."""
    state, slots = contents.facts.state, contents.slots()
    window = is_window_policy(contents.facts.policy)  # each of its snapshots holds a part of the model
    if missing := _missing(slots, state.get("shape")):
        remainder = f", nor are {len(missing) - 1} other operators" if len(missing) > 1 else ""
        remedy = WITH_FLAGS if window else "convert another checkpoint, which has all operators"
        raise CheckpointError(f"{missing[0]} is not there{remainder}. Fix: {remedy}", code="operator-missing")
    needed = required_slots(state.get("optimizer")) or (PARAM,)
    for name, stored_slots in slots.items():
        required = (PARAM,) if is_module_state(name) else needed
        if missing_slots := sorted(set(required) - stored_slots.keys()):
            remedy = WITH_FLAGS if window else "pass --no-optim to convert only the weights"
            raise CheckpointError(
                f"there is no {' and no '.join(missing_slots)} of {name}. Fix: {remedy}",
                code="optimizer-state-missing",
            )


class DigestSums:
    """Digests of the chunks that are read from a checkpoint, of operators whose digests it stores."""

    def __init__(self, contents: ConvertedState):
        self._contents, self._sums = contents, Counter[Key]()
        self._operators = {operator for operator, _ in contents.digests}
        self._sized = {(operator, slot.partition(":")[2]) for operator, slot in contents.digests}

    def read(self, chunk: TensorBox) -> torch.Tensor:
        """Reads a chunk, and adds its values."""
        values, operator = self._contents.read(chunk.name, chunk.slot, chunk.region), operator_or_other(chunk.name)
        if operator in self._operators and chunk.slot != Detail.GRAD.value:
            size = str(math.prod(chunk.global_shape))
            slot = digest_slot(chunk.name, chunk.slot) + (f":{size}" if (operator, size) in self._sized else "")
            digest = ChunkDigest.of_values(chunk.name, chunk.global_shape, chunk.region, values)
            self._sums[operator, slot] += int(digest())
        return values

    def total(self) -> dict[Key, int]:
        """Returns the digests of all chunks that were read."""
        return {key: value & MASK for key, value in self._sums.items() if value & MASK}

    def to_text(self) -> dict[str, dict[str, str]]:
        """Returns the digests as JSON-compatible values."""
        total = self.total()
        return to_text(total.keys(), total.values())


def check_digests(contents: ConvertedState, where: Path) -> None:
    """Compares the contents of a checkpoint with the digests that it stores, tensor by tensor.

    Raises:
        CheckpointError: the state of an operator differs.
    """
    sums = DigestSums(contents)
    for tensor in contents.stored() if contents.digests else ():
        sums.read(tensor)
    if wrong := differing_operators(sums.total(), contents.digests):
        raise state_error(where, wrong)


def describe_unverified(contents: ConvertedState, where: Path) -> str:
    """Returns a sentence about operators of a checkpoint without digests; empty if all have digests."""
    if not contents.digests:
        return f"{where} is not verified: it has no digests"
    unverified = sorted({*contents.operators} - {operator for operator, _ in contents.digests})
    return f"{where} is not verified completely: {name_operators(unverified)} have no digests" if unverified else ""


def check_written(sums: Iterable[DigestSums], contents: ConvertedState, where: Path) -> dict[Key, int]:
    """Compares the optimizer state that was written with the digests of its source; returns all digests.

    Raises:
        CheckpointError: the state of an operator differs.
    """
    total = Counter[Key]()
    for digest_sums in sums:
        total.update(digest_sums.total())
    written = {key: value & MASK for key, value in total.items()}
    compared = {key: contents.digests.get(key, 0) for key in written if key[1].partition(":")[0] != PARAM}
    if wrong := differing_operators({key: written[key] for key in compared}, compared):
        raise state_error(where, wrong)
    return written


def _missing(names: Iterable[str], shape: Any) -> list[str]:
    try:
        return missing_operators(names, shape)
    except ValueError as error:
        raise CheckpointError(
            f"the state of the checkpoint {error}. Fix: convert another checkpoint with --iteration",
            code="model-description-invalid",
        ) from None


Advance = Callable[[int], None]
_NUMBER = re.compile(r"\d+")


def complete_tensors(reader: ShardReader) -> list[TensorBox]:
    """Returns every tensor and optimizer-state key with a part in region files, in model order.

    Raises:
        CheckpointError: files contradict each other about a tensor.
    """
    tensors: dict[tuple[str, str], TensorBox] = {}
    for source in reader.sources():
        part = source.box
        complete = TensorBox(part.name, part.slot, part.global_shape, complete_bounds(part.global_shape), part.dtype)
        if tensors.setdefault((part.name, part.slot), complete) != complete:
            raise CheckpointError(
                f"{source.blob.name} contradicts other files about shape or dtype of {part.name}. Fix: convert "
                "another checkpoint with --iteration",
                code="checkpoint-damaged",
            )
    return in_model_order(tensors.values())


def in_model_order(entries: Iterable[TensorBox]) -> list[TensorBox]:
    """Sorts tensors from the embedding to the output, masters before other optimizer-state keys."""
    return sorted(entries, key=lambda entry: (_model_order_key(entry.name), entry.slot != MASTER, entry.slot))


def read_region(reader: ShardReader, name: str, slot: str, region: Region) -> torch.Tensor:
    """Reads a chunk from region files; raises CheckpointError if they do not contain it."""
    try:
        return reader.read_region(name, slot, region)
    except MissingTensorError as missing:
        raise CheckpointError(
            f"{cause_of(missing)}. Fix: list all damage with tools/verify_checkpoint.py, and convert another "
            "checkpoint",
            code=code_of(missing),
        ) from None


def cut_tensors(tensors: Iterable[TensorBox], parts: int) -> list[list[TensorBox]]:
    """Cuts tensors, laid end to end, into parts of equal size; each part is a list of chunks."""
    tensors = list(tensors)
    total, position = sum(tensor.nbytes for tensor in tensors), 0
    cut: list[list[TensorBox]] = [[] for _ in range(parts)]
    for tensor in tensors:
        size, start = tensor.dtype.itemsize, 0
        while start < tensor.region.numel:
            part = position * parts // total
            remaining_bytes = -(-total * (part + 1) // parts) - position  # bytes up to the next part
            stop = min(tensor.region.numel, start + -(-remaining_bytes // size))
            regions = regions_of_range(tensor.global_shape, start, stop)
            cut[part] += [replace(tensor, region=region) for _, region in regions]
            position, start = position + (stop - start) * size, stop
    return cut


def write_regions(path: Path, entries: Iterable[TensorBox], sums: DigestSums, advance: Advance) -> FileEntry:
    """Writes a region file durably, chunk by chunk, from the contents of ``sums``; returns its manifest entry."""
    layout = FileLayout(entries)

    def values() -> Iterator[torch.Tensor]:
        for entry in layout.entries:
            yield sums.read(entry)
            advance(entry.nbytes)

    return write_values(path, layout, values())


def refuse_to_replace(directory: Path) -> None:
    """Raises CheckpointError unless a directory has at most the files of a save killed before its manifest."""
    names = os.listdir(directory) if directory.exists() else []
    if not all(name.startswith(("rank_", ".rank_")) for name in names):
        raise CheckpointError(
            f"{directory} exists. Fix: remove it, or name another output directory",
            code="output-exists",
        )


def _model_order_key(name: str) -> tuple:
    """Returns a sort key: embedding, layers by number, output; within a layer by name, experts by number."""
    outside = 0 if name.startswith("embedding.") else 1 if name.startswith("decoder.layers.") else 2
    return outside, [int(number) for number in _NUMBER.findall(name)[:1]], _NUMBER.sub(lambda n: n[0].zfill(9), name)
