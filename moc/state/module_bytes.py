"""Serializes values of modules into bytes: numbers, tensors and small containers, without pickle.

The bytes start with the length of a JSON header (8 bytes, little-endian).  The header holds the values by path; a
tensor is an index into a table (dtype, shape, offset).  The tensors' data follow the header.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from moc.errors import UserError
from moc.files import decode, safe_directory
from moc.files.decode import Count, Name, Sizes

_ALIGNMENT = 16
_PLAIN = (bool, int, float, str, type(None))
_SEQUENCES = {"list": list, "tuple": tuple, "set": set}
_KINDS = {kind: name for name, kind in _SEQUENCES.items()} | {torch.Size: "tuple"}


_Row = tuple[Name, Sizes, Count, Name]  # dtype, shape, offset after the header, and type of device


@dataclass(frozen=True)
class _Header:
    """Contents of the bytes."""

    values: dict[str, Any]
    tensors: list[_Row]


class ModuleStateError(UserError, ValueError):
    """Module state cannot be serialized, or its bytes are not valid."""

    code = "module-state-invalid"


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor of any layout, uint8 of shape [nbytes]; a view if it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def size_of(values: Mapping[str, Any]) -> int:
    """Returns the number of bytes that :func:`pack` writes for the supported ones among some values."""
    header, tensors = _described({path: value for path, value in values.items() if _is_supported(value)})
    return _start(header) + sum(_aligned(tensor.nbytes) for tensor in tensors)


@torch.no_grad()
def pack(values: Mapping[str, Any], target: torch.Tensor) -> None:
    """Write values into a uint8 tensor.

    Raises:
        ModuleStateError: the tensor is too small, or a value has another type.
    """
    header, tensors = _described(values)
    offset = _start(header)
    needed = offset + sum(_aligned(tensor.nbytes) for tensor in tensors)
    if needed > target.numel():
        raise ModuleStateError(
            f"module state: {', '.join(values)} need {needed} bytes, and {target.numel()} are reserved. Fix: create "
            "tensors in their final size in the constructor of the module",
            code="module-state-too-large",
        )
    text = len(header).to_bytes(8, "little") + header
    # not blocking: otherwise each iteration of a module with such values would wait for the device
    target[: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8), non_blocking=True)
    for tensor in tensors:
        target[offset : offset + tensor.nbytes].copy_(flat_bytes(tensor), non_blocking=True)
        offset += _aligned(tensor.nbytes)


@torch.no_grad()
def unpack(source: torch.Tensor, current: Mapping[str, Any]) -> dict[str, Any]:
    """Read values from a uint8 tensor; the inverse of :func:`pack`.

    Tensors, arrays and generators of ``current`` with the same path, shape and dtype are filled in place.

    Raises:
        ModuleStateError: the bytes are not valid.
    """
    length = int.from_bytes(_plain(source[:8]), "little")
    if length == 0:
        return {}
    try:
        if length > min(source.numel() - 8, safe_directory.MAX_HEADER_BYTES):
            raise ValueError(f"the header cannot have {length:,} bytes")
        header = decode.decode(_plain(source[8 : 8 + length]), _Header)
        reader = _Reader(source, _start_after(length), header.tensors)
        return {path: reader.value(described, current.get(path)) for path, described in header.values.items()}
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise ModuleStateError(
            f"module state: the saved bytes are not valid ({type(error).__name__}: {error}). Fix: resume from another "
            "snapshot (--ckpt-step)",
            code="module-state-invalid",
        ) from None


def _described(values: Mapping[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
    tensors: list[torch.Tensor] = []
    trees = {}
    for path, value in values.items():
        try:
            trees[path] = _tree(value, tensors)
        except TypeError as error:
            raise ModuleStateError(
                f"module state: {path} changes and cannot be saved: {error}. Fix: keep it in a buffer, a number or a "
                "container of these",
                code="module-state-unsupported",
            ) from None
    table, offset = [], 0
    for tensor in tensors:
        table.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, tensor.device.type])
        offset += _aligned(tensor.nbytes)
    return json.dumps({"values": trees, "tensors": table}, separators=(",", ":")).encode(), tensors


def _is_supported(value: Any) -> bool:
    try:
        _tree(value, [])
    except TypeError:
        return False
    return True


def _tree(value: Any, tensors: list[torch.Tensor]) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[_tree(key, tensors), _tree(part, tensors)] for key, part in value.items()]}
    if isinstance(value, collections.deque):
        return {"deque": [_tree(part, tensors) for part in value], "maxlen": value.maxlen}
    if type(value) in _KINDS:
        return {_KINDS[type(value)]: [_tree(part, tensors) for part in value]}
    kind, tensor = _as_tensor(value)
    tensors.append(tensor)
    return {kind: len(tensors) - 1}


def _as_tensor(value: Any) -> tuple[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return "tensor", value.detach()
    if isinstance(value, torch.Generator):
        return "generator", value.get_state()
    if isinstance(value, numpy.generic):
        return "number", torch.from_numpy(numpy.array(value))
    if isinstance(value, numpy.ndarray):
        native = numpy.ascontiguousarray(value, value.dtype.newbyteorder("="))  # no negative strides
        return "array", torch.from_numpy(native.reshape(value.shape))
    raise TypeError(f"values of type {type(value).__name__} have no representation without pickle")


class _Reader:
    """Reads values of a header."""

    def __init__(self, source: torch.Tensor, start: int, table: Sequence[_Row]):
        self._source, self._start, self._table = source, start, table
        self._used: set[int] = set()

    def value(self, tree: Any, current: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        if not tree:
            raise ValueError("a value has no type")
        kind, content = next(iter(tree.items()))
        if kind == "complex":
            return complex(*content)
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind == "dict":
            current_values = current if isinstance(current, dict) else {}
            pairs = [(self.value(key, None), part) for key, part in content]
            read = {key: self.value(part, current_values.get(key)) for key, part in pairs}
            if not isinstance(current, dict):
                return read
            current.clear()
            current.update(read)  # keeps its type, such as Counter
            return current
        if kind == "deque":
            return collections.deque((self.value(part, None) for part in content), tree["maxlen"])
        if kind in _SEQUENCES:
            current_values = (
                list(current) if isinstance(current, (list, tuple)) and len(current) == len(content) else []
            )
            current_values += [None] * (len(content) - len(current_values))
            return _SEQUENCES[kind](self.value(part, old) for part, old in zip(content, current_values, strict=True))
        return self._from_tensor(kind, self._tensor(content), current)

    def _tensor(self, number: int) -> torch.Tensor:
        if number in self._used:
            raise ValueError("a tensor is used twice")
        self._used.add(number)
        name, shape, offset, device = self._table[number]
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} is no dtype")
        begin = self._start + offset
        end = begin + math.prod(shape) * dtype.itemsize
        if end > self._source.numel():
            raise ValueError("a tensor reaches beyond the saved bytes")
        read = self._source[begin:end].clone().view(dtype).reshape(shape)
        return read.cpu() if device == "cpu" else read

    def _from_tensor(self, kind: str, read: torch.Tensor, current: Any) -> Any:
        if kind == "tensor":
            if isinstance(current, torch.Tensor) and (current.shape, current.dtype) == (read.shape, read.dtype):
                current.detach().copy_(read)
                return current
            return read
        if kind == "generator":
            generator = current if isinstance(current, torch.Generator) else torch.Generator()
            generator.set_state(read.cpu())
            return generator
        return read.cpu().numpy()[()] if kind == "number" else read.cpu().numpy()


def _plain(values: torch.Tensor) -> bytes:
    return values.cpu().numpy().tobytes()


def _start(header: bytes) -> int:
    return _start_after(len(header))


def _start_after(length: int) -> int:
    return _aligned(8 + length)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
