"""Shard files: safetensors files whose entries are boxes of named tensors of the unpartitioned model, with hashes.

A reader assembles any box of any tensor from the chunks that overlap it, independent of the layout that wrote them.
Nothing is unpickled, and only the needed bytes are read.  The format is described in ``docs/reference/format.md``.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch

from moc.errors import cause_of
from moc.state.operators import MODULE_STATE, Fragment, Region
from moc.store.errors import DamagedTensorError, MissingTensorError
from moc.store.header import BoxWithTexts, FileLayout, read_boxes
from moc.store.manifest import FileEntry, compute_digest
from moc.store.storage import Blob, LocalBlob

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorBox(BoxWithTexts):
    """A box of one slot of a named tensor.

    Attributes:
        name: tensor name in the unpartitioned model.
        slot: slot of the tensor: ``master``, ``exp_avg``, ...
        global_shape: shape of the complete tensor.
        region: bounds of the box.
        dtype: dtype of the elements.
    """

    name: str
    slot: str
    global_shape: tuple[int, ...]
    region: Region
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._nbytes

    @cached_property
    def _nbytes(self) -> int:
        return self.region.numel * self.dtype.itemsize

    @property
    def stored_as(self) -> str:
        """Name of the dtype in safetensors."""
        return _NAMES[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


@dataclass(frozen=True)
class BoxTensor:
    """An :class:`TensorBox`, and its values: a contiguous tensor of ``region.numel`` elements, on any device."""

    name: str
    slot: str
    global_shape: tuple[int, ...]
    region: Region
    values: torch.Tensor

    @property
    def box(self) -> TensorBox:
        """The entry without its values."""
        return TensorBox(self.name, self.slot, self.global_shape, self.region, self.values.dtype)


def write_shard_file(path: Path, tensors: Iterable[BoxTensor]) -> FileEntry:
    """Writes one file, copying one tensor at a time to the host."""
    tensors = sorted(tensors, key=lambda tensor: -tensor.values.dtype.itemsize)
    layout = FileLayout(tensor.box for tensor in tensors)
    return write_values(path, layout, (tensor.values.detach().cpu() for tensor in tensors))


def write_values(path: Path, layout: FileLayout, values: Iterable[torch.Tensor]) -> FileEntry:
    """Writes one file durably, with values on the host in the order of the layout; returns its manifest entry."""
    digests = []
    with open(path, "wb") as file:
        file.seek(layout.header_bytes)
        for tensor in values:
            data = tensor_bytes(tensor)
            digests.append(compute_digest(data))
            file.write(data)
        header = layout.header(digests)
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(layout.nbytes, len(header), compute_digest(header))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor on the host, without a copy if it is contiguous."""
    values: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()  # typeshed does not declare it a buffer
    return memoryview(values)


@dataclass(frozen=True, eq=False)
class StoredTensorBox:
    """An entry of a file, the offset of its first byte there, and the xxh3-128 of its bytes in hex, if recorded."""

    blob: Blob
    box: TensorBox
    start: int
    digest: str | None

    def find_damage(self) -> str | None:
        """Describes the damage of the bytes; None if they are intact."""
        if self.digest in (None, compute_digest(self.read_data())):
            return None
        entry = self.box
        return (
            f"{self.blob.name} is damaged: {entry.slot} of {entry.name} at {entry.region.offset} "
            "does not match its hash"
        )

    def read_data(self) -> memoryview:
        """Returns the bytes of the entry."""
        return self.blob.read(self.start, self.start + self.box.nbytes)

    def read_tensor(self) -> torch.Tensor:
        """Returns the values in the shape of the box, possibly a view of a mapped file."""
        if not self.box.region.numel:
            return torch.empty(self.box.region.shape, dtype=self.box.dtype)
        flat = torch.from_numpy(numpy.frombuffer(self.read_data(), dtype=numpy.uint8))
        return flat.view(self.box.dtype).view(self.box.region.shape)


def read_stored_boxes(blob: Blob) -> list[StoredTensorBox]:
    """Returns the entries of a file.

    Raises:
        MissingTensorError: the file is not a shard file.
    """
    try:
        boxes = read_boxes(blob.name, blob.size, blob.read)
        for box in boxes:
            ends = zip(box.region.offset, box.region.shape, box.global_shape, strict=True)
            if any(first + count > size for first, count, size in ends):
                raise ValueError(f"a box of {box.slot} of {box.name} reaches beyond the tensor")
        described = [
            TensorBox(box.name, box.slot, box.global_shape, box.region, _DTYPES[box.stored_as]) for box in boxes
        ]
        return [
            StoredTensorBox(blob, entry, box.start, box.digest) for entry, box in zip(described, boxes, strict=True)
        ]
    except (OSError, KeyError, ValueError) as error:
        raise MissingTensorError(
            f"{blob.name} is not a file of regions: its header is damaged ({cause_of(error)}). Fix: restore it from a "
            "copy, or load another checkpoint (--ckpt-step)",
            code="checkpoint-damaged",
        ) from None


class ShardReader:
    """Reads any box of any tensor from a set of files.

    Args:
        files: files from :func:`write_shard_file` or a snapshot; they hold each element at most once.
        verifies: verify the hash of each entry before use.
        opens_lazily: open a file only when the previous ones do not hold all requested data.

    Raises:
        MissingTensorError: a file is not a shard file, or files contradict each other; with ``opens_lazily``, raised
            when a file is opened.
    """

    def __init__(self, files: Iterable[Path | Blob], verifies: bool = False, opens_lazily: bool = False):
        self._sources: dict[tuple[str, str], list[StoredTensorBox]] = defaultdict(list)
        self._verify, self._verified = verifies, set()
        self._unopened = iter(files)
        if not opens_lazily:
            self._open_all()

    def __contains__(self, tensor: tuple[str, str]) -> bool:
        """Returns whether the files hold any part of (name, slot)."""
        while tensor not in self._sources and self._open_next():
            pass
        return tensor in self._sources

    def sources(self) -> Iterator[StoredTensorBox]:
        """Yields every entry of all files."""
        self._open_all()
        for sources in self._sources.values():
            yield from sources

    def global_shape(self, name: str, slot: str) -> tuple[int, ...]:
        """Returns the global shape of a saved tensor.

        Raises:
            MissingTensorError: no file holds any part of it.
        """
        if (name, slot) not in self:
            raise MissingTensorError(
                f"no file holds {slot} of {name}. Fix: load a checkpoint of this model that has it"
            )
        return self._sources[name, slot][0].box.global_shape

    def will_read(self, name: str, slot: str, region: Region) -> None:
        """Hints that a box will be read soon; its entries in open files are read ahead."""
        for source in list(self._sources.get((name, slot), ())):
            if region.intersect(source.box.region) is not None:
                source.blob.will_read(source.start, source.start + source.box.nbytes)

    def read_region(self, name: str, slot: str, region: Region) -> torch.Tensor:
        """Returns a box of a tensor, on the host; a view of the file if one entry holds all of it.

        Raises:
            MissingTensorError: the files do not hold all of the box.
            DamagedTensorError: stored bytes do not match their hash.
        """
        for source, common in self._covering_sources(name, slot, region):
            if common == region:
                return self._verified_tensor(source)[common.slices(source.box.region.offset)]
        into = torch.empty(region.shape, dtype=self._sources[name, slot][0].box.dtype)
        self.read_into(name, slot, region, into)
        return into

    def read_into(self, name: str, slot: str, region: Region, into: torch.Tensor) -> None:
        """Fills ``into`` (``region.numel`` elements, any device) with a box of a tensor, as :meth:`read_region`."""
        target = into.view(region.shape)
        for source, common in self._covering_sources(name, slot, region):
            target[common.slices(region.offset)].copy_(
                self._verified_tensor(source)[common.slices(source.box.region.offset)]
            )

    def _covering_sources(self, name: str, slot: str, region: Region) -> list[tuple[StoredTensorBox, Region]]:
        """Returns the entries that cover a box; raises MissingTensorError before memory is allocated for it."""
        self.global_shape(name, slot)
        overlaps = list(self._overlapping_sources(name, slot, region))
        filled = sum(common.numel for _, common in overlaps)
        if filled != region.numel:
            raise MissingTensorError(
                f"files hold {filled} of {region.numel} elements of {slot} of {name} at {region.offset}. Fix: load "
                "a checkpoint that has all of them"
            )
        return overlaps

    def _overlapping_sources(self, name: str, slot: str, region: Region) -> Iterator[tuple[StoredTensorBox, Region]]:
        """Yields entries that overlap a box, with the overlap; opens files until the box is covered."""
        examined, missing = 0, region.numel
        while missing:
            sources = self._sources.get((name, slot), [])
            for source in sources[examined:]:
                if (common := region.intersect(source.box.region)) is not None:
                    missing -= common.numel
                    yield source, common
            examined = len(sources)
            if missing and not self._open_next():
                return

    def _open_next(self) -> bool:
        file = next(self._unopened, None)
        if file is not None:
            for source in read_stored_boxes(_open_blob(file)):
                sources = self._sources[source.box.name, source.box.slot]
                if sources and sources[0].box.global_shape != source.box.global_shape:
                    raise MissingTensorError(
                        f"{source.blob.name} is damaged: {source.box.slot} of {source.box.name} has another shape "
                        f"than in {sources[0].blob.name}. Fix: restore both from a copy, or load another checkpoint "
                        "(--ckpt-step)",
                        code="checkpoint-damaged",
                    )
                sources.append(source)
        return file is not None

    def _open_all(self) -> None:
        while self._open_next():
            pass

    def _verified_tensor(self, source: StoredTensorBox) -> torch.Tensor:
        if self._verify and source not in self._verified:
            if damage := source.find_damage():
                raise DamagedTensorError(
                    f"{damage}. Fix: restore it from a copy, or load another checkpoint (--ckpt-step)"
                )
            self._verified.add(source)
        return source.read_tensor()


def _open_blob(file: Path | Blob) -> Blob:
    if isinstance(file, (str, Path)):
        try:
            return LocalBlob(Path(file))
        except OSError as error:
            raise MissingTensorError(
                f"{file} is not a file of regions ({cause_of(error)}). Fix: restore it from a copy, or load another "
                "checkpoint (--ckpt-step)",
                code="checkpoint-damaged",
            ) from None
    return file


_INDEX = re.compile(r"[0-9]{1,9}")
"""The last part of a name of module state: the index of the worker that saved it."""


def read_values(fragment: Fragment, reader: ShardReader) -> torch.Tensor:
    """Returns the values of a fragment, in the shape of its region, on the host; possibly a view of a mapped file.

    Vocabulary rows that are padding only in this layout are zeros.  If the checkpoint has another layout, values of
    user modules are those that another worker of the stage saved; zeros mean that no values were saved.

    Raises:
        MissingTensorError: the checkpoint holds the tensor only in part, or in another shape.
        DamagedTensorError: stored bytes do not match their hash.
    """
    name, region = fragment.name, fragment.region
    if name.startswith(MODULE_STATE) and (name, fragment.slot) not in reader:
        name = _name_saved_by_another_worker(name, reader)
        if name is None:
            return torch.zeros(region.shape, dtype=fragment.view.dtype)
    saved = reader.global_shape(name, fragment.slot)
    if saved == fragment.global_shape:
        return reader.read_region(name, fragment.slot, region)
    if not fragment.padded or len(saved) != len(region.shape):
        raise MissingTensorError(
            f"{name} has shape {saved} in the checkpoint and {fragment.global_shape} in this model. Fix: give the "
            "flags of the saved model, or load another checkpoint",
            code="checkpoint-of-another-model",
        )
    common = region.intersect(Region((0,) * len(saved), saved))
    if common == region:
        return reader.read_region(name, fragment.slot, region)
    values = torch.zeros(region.shape, dtype=fragment.view.dtype)
    if common is not None:
        values[common.slices(region.offset)] = reader.read_region(name, fragment.slot, common)
    return values


def _name_saved_by_another_worker(name: str, reader: ShardReader) -> str | None:
    """Returns the saved module state of the same operator with the lowest index."""
    operator_prefix = name.rpartition(".")[0] + "."
    saved = {box_name.box.name for box_name in reader.sources() if box_name.box.name.startswith(operator_prefix)}
    numbers = {
        int(last): saved_name
        for saved_name in saved
        if _INDEX.fullmatch(last := saved_name.removeprefix(operator_prefix))
    }
    return numbers[min(numbers)] if numbers else None


def read_ahead(
    fragments: Sequence[Fragment], reader: ShardReader, max_bytes_ahead: int = 64 << 20
) -> Iterator[Fragment]:
    """Yields fragments in order while a thread reads later values, up to ``max_bytes_ahead`` bytes ahead."""
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        requested, bytes_ahead = 0, 0
        for number, fragment in enumerate(fragments):
            while requested < len(fragments) and (bytes_ahead < max_bytes_ahead or requested <= number):
                upcoming = fragments[requested]
                thread.submit(reader.will_read, upcoming.name, upcoming.slot, upcoming.region)
                requested, bytes_ahead = requested + 1, bytes_ahead + upcoming.view.nbytes
            yield fragment
            bytes_ahead -= fragment.view.nbytes
