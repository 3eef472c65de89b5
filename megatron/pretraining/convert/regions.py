"""Reads and writes region files, which hold all of Format v1 and the optimizer state of dense checkpoints."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megatron.pretraining.convert.contents import MASTER, ConvertedState, whole_of
from moc.errors import cause_of, code_of
from moc.state.region import Region, boxes_of_range
from moc.store.errors import CheckpointError
from moc.store.manifest import FileEntry
from moc.store.shard_file import FileLayout, MissingTensorError, ShardReader, TensorBox, write_values

Advance = Callable[[int], None]
_NUMBER = re.compile(r"\d+")


def whole_tensors(reader: ShardReader) -> list[TensorBox]:
    """Returns every tensor and optimizer-state key of which region files hold a part, in model order.

    Raises:
        CheckpointError: files contradict each other about a tensor.
    """
    found: dict[tuple[str, str], TensorBox] = {}
    for source in reader.sources():
        part = source.box
        whole = TensorBox(part.name, part.slot, part.global_shape, whole_of(part.global_shape), part.dtype)
        if found.setdefault((part.name, part.slot), whole) != whole:
            raise CheckpointError(
                f"{source.blob.name} contradicts other files about shape or dtype of {part.name}. Fix: convert "
                "another checkpoint with --iteration",
                code="checkpoint-damaged",
            )
    return in_model_order(found.values())


def in_model_order(entries: Iterable[TensorBox]) -> list[TensorBox]:
    """Sorts tensors from the embedding to the output, masters before other optimizer-state keys."""
    return sorted(entries, key=lambda entry: (_place_in_model(entry.name), entry.slot != MASTER, entry.slot))


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


def cut(tensors: Iterable[TensorBox], parts: int) -> list[list[TensorBox]]:
    """Cuts tensors, laid end to end, into parts of equal size; each part is a list of chunks."""
    tensors = list(tensors)
    total, position = sum(tensor.nbytes for tensor in tensors), 0
    found: list[list[TensorBox]] = [[] for _ in range(parts)]
    for tensor in tensors:
        size, start = tensor.dtype.itemsize, 0
        while start < tensor.region.numel:
            part = position * parts // total
            room = -(-total * (part + 1) // parts) - position  # bytes up to the next part
            stop = min(tensor.region.numel, start + -(-room // size))
            boxes = boxes_of_range(tensor.global_shape, start, stop)
            found[part] += [replace(tensor, region=box) for _, box in boxes]
            position, start = position + (stop - start) * size, stop
    return found


def write_regions(path: Path, entries: Iterable[TensorBox], contents: ConvertedState, advance: Advance) -> FileEntry:
    """Writes a region file durably, chunk by chunk; returns its manifest entry."""
    layout = FileLayout(entries)

    def values() -> Iterator[torch.Tensor]:
        for entry in layout.entries:
            yield contents.read(entry.name, entry.slot, entry.region)
            advance(entry.nbytes)

    return write_values(path, layout, values())


def refuse_to_replace(directory: Path) -> None:
    """Raises CheckpointError unless a directory has at most the rest of a save killed before its manifest."""
    there = os.listdir(directory) if directory.exists() else []
    if not all(name.startswith(("rank_", ".rank_")) for name in there):
        raise CheckpointError(
            f"{directory} exists. Fix: remove it, or name another output directory",
            code="output-exists",
        )


def _place_in_model(name: str) -> tuple:
    """Returns a sort key: embedding, layers by number, output; within a layer by name, experts by number."""
    outside = 0 if name.startswith("embedding.") else 1 if name.startswith("decoder.layers.") else 2
    return outside, [int(number) for number in _NUMBER.findall(name)[:1]], _NUMBER.sub(lambda n: n[0].zfill(9), name)
