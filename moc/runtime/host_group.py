"""Exchanges values among all workers in host memory, as JSON; commit all-reduces use the same process group.

On a GPU an operation is only enqueued when the call returns.  After an abort the stream continues over undefined
memory.  A peer's abort may even complete this worker's operation with undefined memory, before this worker receives
the abort.  gloo's operations are complete when they return, or raise: no result is ambiguous.

So workers agree over gloo, after each has copied its contribution to the host.  A completed commit all-reduce proves
that no worker's generation was over when its contribution reached the host.  Everything before the contribution is
therefore valid on all workers.  A gather proves nothing about work enqueued on a device.

Decoding JSON runs no code, unlike a pickle.  JSON has no tuples, sets or records of ours, so these are objects with one
tag:

    {"tuple": [...]}   {"set": [...]}   {"frozenset": [...]}   {"dict": [[key, value], ...]}   {"bytes": "base64"}
    {"enum": ["module:name", member]}   {"record": ["module:name", value, ...]}, a dataclass or named tuple of ours
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moc.files.decode import parse

OURS = ("moc.", "megatron.pretraining.")
"""Prefixes of modules whose records are decoded."""

_GROUPS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}


class PlainError(ValueError):
    """The data is no value that a worker of this job sends."""


def encode(value: object) -> bytes:
    """Encodes None, numbers, text, bytes, lists, tuples, sets, dicts, enums, and records of them.

    Raises:
        TypeError: the value contains something else.
    """
    return json.dumps(_packed(value), separators=(",", ":")).encode()


def decode(data: bytes) -> object:
    """Decodes data from :func:`encode` to an equal value, except that mappings become dicts.

    Raises:
        PlainError: the data is not from :func:`encode`.
    """
    try:
        return _unpacked(parse(data))
    except PlainError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise PlainError(f"{type(error).__name__}: {error}") from None


def _packed(value: object) -> object:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [*map(_packed, value)]  # pyright: ignore[reportArgumentType]  # it is a list
    if kind in _GROUPS:
        return {_GROUPS[kind]: [*map(_packed, value)]}  # pyright: ignore[reportArgumentType]  # it is iterable
    if isinstance(value, enum.Enum):
        return {"enum": [_name(kind), value.name]}
    if isinstance(value, Mapping):
        return {"dict": [[_packed(key), _packed(each)] for key, each in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if dataclasses.is_dataclass(value):
        return {"record": [_name(kind), *(_packed(getattr(value, each.name)) for each in dataclasses.fields(value))]}
    if isinstance(value, tuple):
        return {"record": [_name(kind), *map(_packed, value)]}
    for plain in (int, float, str):  # numpy's numbers are subclasses, or look like them
        if isinstance(value, plain):
            return plain(value)
    raise TypeError(f"workers cannot tell one another a {kind.__module__}.{kind.__qualname__}")


def _unpacked(value):
    if isinstance(value, list):
        return [*map(_unpacked, value)]
    if not isinstance(value, dict):
        return value
    ((tag, its),) = value.items()
    if tag == "dict":
        return {_unpacked(key): _unpacked(each) for key, each in its}
    if tag == "bytes":
        return base64.b64decode(its, validate=True)
    for kind, name in _GROUPS.items():
        if tag == name:
            return kind(map(_unpacked, its))
    if tag == "enum" and issubclass(kind := _kind(its[0]), enum.Enum):
        return kind[its[1]]
    if tag == "record":
        return _record(_kind(its[0]), [*map(_unpacked, its[1:])])
    raise PlainError(f"it has an unknown {tag}")


def _record(kind: type, values: list):
    """Fills a record without calling its class, so that none of its code runs."""
    if not dataclasses.is_dataclass(kind):
        if not (issubclass(kind, tuple) and len(getattr(kind, "_fields", ())) == len(values)):
            raise PlainError(f"{kind.__qualname__} is no record, or another version's")
        return tuple.__new__(kind, values)
    made = object.__new__(kind)
    for each, value in zip(dataclasses.fields(kind), values, strict=True):
        object.__setattr__(made, each.name, value)
    return made


def _name(kind: type) -> str:
    if not f"{kind.__module__}.".startswith(OURS):
        raise TypeError(f"workers cannot tell one another a {kind.__module__}.{kind.__qualname__}")
    return f"{kind.__module__}:{kind.__qualname__}"


def _kind(name: str) -> type:
    if not isinstance(name, str):
        raise PlainError(f"{name!r} is no name of a record")
    module, _, path = name.partition(":")
    kind: object = sys.modules.get(module) if f"{module}.".startswith(OURS) else None
    for part in path.split("."):
        kind = getattr(kind, part, None)
    if not isinstance(kind, type) or f"{kind.__module__}:{kind.__qualname__}" != name:
        raise PlainError(f"there is no record {name} here")
    return kind


_group: dist.ProcessGroup | None = None


def host_group() -> dist.ProcessGroup | None:
    """Returns the group; None for the world's own, whose backend is gloo."""
    return _group


def use(group: object) -> None:
    """Sets the group; None if the world's own backend is gloo, or the world is destroyed."""
    global _group
    assert group is None or isinstance(group, dist.ProcessGroup)  # every worker is a member
    _group = group


MOST_BYTES = 1 << 30
"""Most bytes that a worker sends in one exchange."""


def gather(value, group=None) -> list:
    """Returns the values of all ranks of a group (default: all), by group rank.  Collective over the group.

    Each value must be accepted by :func:`moc.runtime.host_group.encode`.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) < dist.get_world_size():
        return _gather_among(ranks, value)
    mine, size = _tensor(encode(value)), len(ranks)
    lengths = mine.new_empty(size, dtype=torch.int64)
    dist.all_gather_into_tensor(lengths, mine.new_tensor([len(mine)], dtype=torch.int64), group=host_group())
    padded = mine.new_zeros(most := _checked(max(lengths.tolist())))
    padded[: len(mine)] = mine
    whole = mine.new_empty(size * most)
    dist.all_gather_into_tensor(whole, padded, group=host_group())
    data = whole.numpy().tobytes()
    return [_value(data[i * most : i * most + length]) for i, length in enumerate(lengths.tolist())]


def _gather_among(ranks: Sequence[int], value) -> list:
    """Gathers values of some workers through the first of them; other workers need not call it."""
    first, *others = ranks
    if dist.get_rank() != first:
        _send(value, first)
        return _receive(first)
    values = [value, *map(_receive, others)]
    for other in others:
        _send(values, other)
    return values


def _send(value, rank: int) -> None:
    data = _tensor(encode(value))
    dist.send(data.new_tensor([len(data)], dtype=torch.int64), rank, group=host_group())
    dist.send(data, rank, group=host_group())


def _receive(rank: int) -> Any:
    length = torch.empty(1, dtype=torch.int64)
    dist.recv(length, rank, group=host_group())
    data = torch.empty(_checked(int(length)), dtype=torch.uint8)
    dist.recv(data, rank, group=host_group())
    return _value(data.numpy().tobytes())


def from_rank0(value) -> Any:
    """Returns rank 0's value on all ranks.  Collective."""
    mine = _tensor(encode(value))
    length = mine.new_tensor([len(mine)], dtype=torch.int64)
    dist.broadcast(length, src=0, group=host_group())
    data = mine if dist.get_rank() == 0 else mine.new_empty(_checked(int(length)))
    dist.broadcast(data, src=0, group=host_group())
    return _value(data.numpy().tobytes())


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _checked(nbytes: int) -> int:
    if not 0 <= nbytes <= MOST_BYTES:
        raise RuntimeError(f"a worker tells the others {nbytes} bytes: none of this job tells more than {MOST_BYTES}")
    return nbytes


def _value(data: bytes) -> Any:
    try:
        return decode(data)
    except PlainError as error:
        raise RuntimeError(f"what a worker told the others is of no worker of this job: {error}") from None
