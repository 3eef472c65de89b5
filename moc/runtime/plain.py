"""Encodes values that workers exchange as JSON; unlike with a pickle, decoding runs no code.

JSON has no tuples, sets or records of ours, so these are objects with one tag:

    {"tuple": [...]}   {"set": [...]}   {"frozenset": [...]}   {"dict": [[key, value], ...]}   {"bytes": "base64"}
    {"enum": ["module:name", member]}   {"record": ["module:name", value, ...]}, a dataclass or named tuple of ours
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import sys
from collections.abc import Mapping

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
