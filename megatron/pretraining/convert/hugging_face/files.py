"""Reads and writes safetensors files of transformers: complete tensors by name, in one file or several."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
import xxhash

from moc.files import decode, safe_directory
from moc.files.decode import FileName, Name, short_repr, shorten
from moc.files.safe_directory import SafeDirectory
from moc.store import header
from moc.store.errors import CheckpointError
from moc.store.shard_file import tensor_bytes
from moc.store.storage import LocalBlob

INDEX, ONE_FILE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = 8  # bytes of the header's length, the first ones of a file
_ALIGNED = 8  # alignment of the data

Advance = Callable[[int], None]


@dataclass(frozen=True)
class TensorSpec:
    """Tensor of an existing or future file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class TensorLocation:
    """Tensor of a file, whose data begin at byte ``start``."""

    tensor: TensorSpec
    blob: LocalBlob
    start: int

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Returns some rows as a view of the mapped file."""
        tensor, begin = self.tensor, self.start + first * self.tensor.row_bytes
        data = self.blob.read(begin, begin + count * tensor.row_bytes)
        values = torch.from_numpy(numpy.frombuffer(data, dtype=numpy.uint8)).view(tensor.dtype)
        return values.view(count, *tensor.shape[1:])


def read_json(path: Path, max_bytes: int = safe_directory.MAX_MANIFEST_BYTES) -> Mapping:
    """Reads the object in a file of at most ``max_bytes`` bytes; raises CheckpointError if there is none."""
    try:
        return decode.require_object(decode.parse(SafeDirectory(path.parent).read(path.name, max_bytes)), "it")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). Fix: correct its permissions, or download it again",
            code="checkpoint-unreadable",
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). Fix: download it again",
            code="checkpoint-damaged",
        ) from None


def read_directory(directory: Path) -> dict[str, TensorLocation]:
    """Returns the tensors of a directory by name.

    Raises:
        CheckpointError: it has no tensors, has pickles, or its files are damaged or contradict the index.
    """
    locations: dict[str, TensorLocation] = {}
    index = _index(directory)
    for file in sorted(set(index.values())) if index is not None else [ONE_FILE]:
        for name, stored in _read_file(directory / file).items():
            if name in locations:
                raise CheckpointError(
                    f"{name} is in two files of {directory}. Fix: remove one of them",
                    code="weights-index-wrong",
                )
            if index is not None and index.get(name) != file:
                raise CheckpointError(
                    f"{directory / INDEX} does not place {name} in {file}. Fix: download the file and the index again",
                    code="weights-index-wrong",
                )
            locations[name] = stored
    if missing := [name for name in index or () if name not in locations]:
        raise CheckpointError(
            f"{missing[0]} is not in {directory / (index or {})[missing[0]]}, where the index places it. Fix: "
            "download the file and the index again",
            code="weights-index-wrong",
        )
    return locations


@dataclass(frozen=True)
class _Index:
    """Contents of :data:`INDEX`: the file of each tensor, by the tensor's name."""

    weight_map: dict[Name, FileName]


def _index(directory: Path) -> dict[str, str] | None:
    if (directory / INDEX).is_file():
        try:
            return decode.convert(read_json(directory / INDEX), _Index).weight_map
        except ValueError as error:
            raise CheckpointError(
                f"{directory / INDEX} is damaged ({error}). Fix: download it again",
                code="checkpoint-damaged",
            ) from None
    if (directory / ONE_FILE).is_file():
        return None
    if pickles := sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern)):
        raise CheckpointError(
            f"{directory} has its weights in pickles ({pickles[0]}), which are never read. Fix: save them as "
            "safetensors with transformers' save_pretrained",
            code="weights-pickled",
        )
    raise CheckpointError(
        f"{directory} has no weights: there is neither {ONE_FILE} nor {INDEX}. Fix: download the files of the "
        "weights, too",
        code="weights-missing",
    )


def _read_file(path: Path) -> dict[str, TensorLocation]:
    try:
        blob = LocalBlob(path)
        tensors, _, begin = header.read_header(blob.size, blob.read)
        header.check_spans(tensors.values(), blob.size - begin, allows_slack=False)
        return {
            decode.require_name(name, "a tensor"): _stored(blob, begin, name, stored_tensor)
            for name, stored_tensor in tensors.items()
        }
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). Fix: correct its permissions, or download it again",
            code="checkpoint-unreadable",
        ) from None
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not a complete file of safetensors ({error}). Fix: download it again",
            code="checkpoint-damaged",
        ) from None


def _stored(blob: LocalBlob, begin: int, name: str, stored_tensor: header.StoredTensor) -> TensorLocation:
    if stored_tensor.dtype not in _DTYPES:
        raise ValueError(
            f"{name} is of dtype {short_repr(stored_tensor.dtype)}, and only {', '.join(_DTYPES)} can be read"
        )
    tensor = TensorSpec(name, stored_tensor.shape, _DTYPES[stored_tensor.dtype])
    start, stop = stored_tensor.data_offsets
    if stop - start != tensor.nbytes:
        raise ValueError(f"{name} must have {shorten(f'{tensor.nbytes:,}')} bytes, and has {stop - start:,}")
    return TensorLocation(tensor, blob, begin + start)


def shards(tensors: Iterable[TensorSpec], file_bytes: int) -> dict[str, list[TensorSpec]]:
    """Assigns tensors to files in order; a file starts where the previous one would exceed its size."""
    files: list[list[TensorSpec]] = []
    remaining_bytes = 0
    for tensor in tensors:
        if not files or tensor.nbytes > remaining_bytes:
            files.append([])
            remaining_bytes = file_bytes
        files[-1].append(tensor)
        remaining_bytes -= tensor.nbytes
    if len(files) == 1:
        return {ONE_FILE: files[0]}
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": part for number, part in enumerate(files, 1)}


def write_file(
    path: Path, tensors: Iterable[TensorSpec], blocks: Callable[[TensorSpec], Iterator[torch.Tensor]]
) -> tuple[dict, dict[str, str]]:
    """Writes a file durably.

    Args:
        path: the file.
        tensors: the tensors to write.
        blocks: yields the values of a tensor, in parts, by rows.

    Returns:
        Size and xxh3-128 of the file, and the xxh3-128 of each tensor.
    """
    ordered, digests, file_digest = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize), {}, xxhash.xxh3_128()
    with open(path, "xb") as file:
        header = _header(ordered)
        file.write(header)
        file_digest.update(header)
        for tensor in ordered:
            tensor_digest = xxhash.xxh3_128()
            for values in blocks(tensor):
                data = tensor_bytes(values)
                file.write(data)
                tensor_digest.update(data)
                file_digest.update(data)
            digests[tensor.name] = tensor_digest.hexdigest()
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "xxh3_128": file_digest.hexdigest()}, digests


def _header(tensors: Iterable[TensorSpec]) -> bytes:
    described: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        described[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // _ALIGNED) * _ALIGNED)
    return len(text).to_bytes(_LENGTH, "little") + text
