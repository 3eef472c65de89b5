"""Decodes JSON of unknown origin into declared types, in linear time; anything else raises ValueError."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any

import msgspec
import xxhash

from moc.errors import UserError
from moc.files.text import shown, without_middle

MOST = 1 << 62
"""Largest number of bytes or elements."""

_LONGEST = 1000  # characters of a name
_DIGEST = "xxh3_128"

Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
"""An integer number of bytes, elements, iterations and the like."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""A duration, or a time since 1970."""

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e300)]
"""A finite quantity above 0."""

Amount = Annotated[float, msgspec.Meta(ge=0, le=1e300)]
"""A finite quantity that is not negative, such as a rate or a mean number of bytes."""

_CONTROLS = (
    r"\x00-\x1f\x7f-\xa0\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f\u2028-\u202f"
    r"\u205f-\u2064\u2066-\u206f\u3000\ud800-\uf8ff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f\U000f0000-\U0010ffff"
)
"""Characters that ``str.isprintable()`` refuses, except unassigned ones, as a part of a pattern."""

Name = Annotated[str, msgspec.Meta(max_length=_LONGEST, pattern=rf"^[^{_CONTROLS}]*\Z")]
"""Text without control and formatting characters."""

FileName = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z_][0-9A-Za-z_.+-]{0,199}\Z")]
"""The name of a file directly in the directory of a checkpoint."""

Sizes = Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
"""Sizes or offsets of a tensor by axis; no library has tensors of more than 64 axes."""

Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
"""An xxh3-128 in hex."""

StateSum = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""A digest of training state in hex (:mod:`moc.state.digests`)."""

RunName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""Name of a run (:mod:`moc.store.runs`)."""


def parse(text: str | bytes | bytearray | memoryview, unique_keys: bool = True) -> Any:
    """Like ``json.loads``, but a key may occur only once in an object.

    Args:
        text: JSON.
        unique_keys: raise if a key repeats, which doubles the time; otherwise the last value counts.

    Raises:
        ValueError: the text is not JSON in UTF-8, is nested too deeply, or repeats a key.
    """
    try:
        parser = _PARSER if unique_keys else _REPEATING
        return parser.decode(text if isinstance(text, str) else str(bytes(text).removeprefix(_MARK), "utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def convert[T](value: Any, to: type[T]) -> T:
    """Converts parsed JSON to a type: a dataclass, a union, a container or one of the types above.

    Integers count as floats, and keys of objects as numbers where the type has numbers.  Unknown fields of a
    dataclass are ignored.

    Raises:
        ValueError: a value is missing, is of another type or is out of range; the message names its place.
    """
    try:
        return msgspec.convert(value, to, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(without_middle(str(error))) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def decode[T](text: str | bytes | bytearray | memoryview, to: type[T]) -> T:
    """Applies :func:`parse`, then :func:`convert`; raises ValueError as they do."""
    return convert(parse(text), to)


class StateError(UserError, ValueError):
    """A saved state does not fit the object that should load it."""

    code = "saved-state-invalid"


def values_of(one: Any) -> dict[str, Any]:
    """Returns the values of a dataclass by field.

    ``vars()`` lacks the fields of a decoded object that were not in the JSON, whose defaults are in the class.
    """
    return {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}


def state[T](value: Any, to: type[T], of: str, every_field: bool = False) -> T:
    """Applies :func:`convert` to the state that an object has saved.

    Args:
        value: the state.
        to: type of the state.
        of: name of the object, for the message.
        every_field: require also the fields of a dataclass that have defaults.

    Raises:
        ValueError: as :func:`convert`.
    """
    try:
        found = convert(value, to)
        if every_field and (missing := values_of(found).keys() - value.keys()):
            raise ValueError(f"it lacks {min(missing)}")
        return found
    except ValueError as error:
        raise StateError(f"this is no state of {of} ({error}). Fix: start without it") from None


def sealed(fields: Mapping[str, Any]) -> str:
    """Returns JSON of some fields with their hash, which :func:`unsealed` verifies."""
    return json.dumps({**fields, _DIGEST: _digest(fields)})


def unsealed[T](text: str | bytes, to: type[T]) -> T:
    """Inverts :func:`sealed`; a text without a hash, from an earlier version, is accepted.

    Raises:
        ValueError: the hash differs, or as :func:`decode`.
    """
    fields = {**table(parse(text), "it")}
    digest = fields.pop(_DIGEST, None)
    if digest is not None and digest != _digest(fields):
        raise ValueError("it does not match its hash")
    return convert(fields, to)


def table(value: object, what: str) -> Mapping[str, Any]:
    """Returns a JSON object whose keys are names; like the following functions, raises ValueError otherwise."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {shown(value)}, and not an object")
    keys = "".join(value)
    if len(keys) > _LONGEST or not keys.isprintable():  # one test per object: reports have hundreds
        for key in value:
            name(key, f"a key of {what}")
    return value


def number(value: object, what: str, most: int = MOST) -> int:
    """Returns an integer from 0 to ``most``."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} is {shown(value)}, and not a number from 0 to {most}")
    return value


def name(value: object, what: str) -> str:
    """Returns the text that a terminal shows as it is."""
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise ValueError(f"{what} is {shown(value)}, and no name")
    return value


def inner_path(value: object) -> str:
    """Returns the path of a file in the directory of a checkpoint or below."""
    path = PurePosixPath(name(value, "a path"))
    if path.is_absolute() or not path.parts or ".." in path.parts:
        raise ValueError(f"{shown(value)} is outside of the checkpoint")
    return str(path)


def digest(value: object, what: str) -> str:
    """Returns an xxh3-128 in hex."""
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{32}", value):
        raise ValueError(f"{what} is {shown(value)}, and no hash")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("an object has the same key twice")
    return fields


_MARK = b"\xef\xbb\xbf"  # of UTF-8; the codec utf-8-sig is a file that a worker of another user may not read
_PARSER = json.JSONDecoder(object_pairs_hook=_object)


def _digest(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


_REPEATING = json.JSONDecoder()
