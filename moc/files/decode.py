"""Decodes and escapes what comes from outside: files, messages and names."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any

import msgspec
import xxhash

from moc.errors import UserError

_MAX_LENGTH = 80
_MAX_MESSAGE_LENGTH = 300
_REPR = reprlib.Repr(maxstring=_MAX_LENGTH, maxother=_MAX_LENGTH, maxlong=_MAX_LENGTH)
_ALLOWED_CONTROLS = "\n\t"

MAX_COUNT = 1 << 62
"""Largest number of bytes or elements."""

_MAX_NAME_LENGTH = 1000  # characters of a name
_HASH_KEY = "xxh3_128"

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
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

Name = Annotated[str, msgspec.Meta(max_length=_MAX_NAME_LENGTH, pattern=rf"^[^{_CONTROLS}]*\Z")]
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
"""Name of a run (:mod:`moc.store.store`)."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of UTF-8; the codec utf-8-sig is a file that a worker of another user may not read
_LENIENT_PARSER = json.JSONDecoder()


def escape_controls(text: object) -> str:
    """Escapes control and formatting characters, other than newline and tab, as in Python literals.

    A terminal therefore cannot interpret bytes of a file as commands.
    """
    string = str(text)
    if string.isprintable():
        return string
    return "".join(
        character if character.isprintable() or character in _ALLOWED_CONTROLS else _escape_character(character)
        for character in string
    )


def escape_line(text: object) -> str:
    """Like :func:`escape_controls`, with newlines escaped too, so that a name cannot add a line to the output."""
    return escape_controls(text).replace("\n", "\\n")


def short_repr(value: object) -> str:
    """Returns a value in a message: short, in ASCII, and without control characters."""
    return shorten(_REPR.repr(value).encode("ascii", "backslashreplace").decode())


def shorten(text: object) -> str:
    """Returns a text in a message, truncated if it is long."""
    string = str(text)
    return string if len(string) <= _MAX_LENGTH else f"{string[: _MAX_LENGTH - 3]}..."


def shorten_middle(text: str) -> str:
    """Returns the start and the end of a library's message, which may contain a long value or a long path."""
    return (
        text
        if len(text) <= _MAX_MESSAGE_LENGTH
        else f"{text[: _MAX_MESSAGE_LENGTH // 2]}...{text[-_MAX_MESSAGE_LENGTH // 2 :]}"
    )


def _escape_character(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def parse(text: str | bytes | bytearray | memoryview, unique_keys: bool = True) -> Any:
    """Like ``json.loads``, but a key may occur only once in an object.

    Args:
        text: JSON.
        unique_keys: raise if a key repeats, which doubles the time; otherwise the last value counts.

    Raises:
        ValueError: the text is not JSON in UTF-8, is nested too deeply, or repeats a key.
    """
    try:
        parser = _STRICT_PARSER if unique_keys else _LENIENT_PARSER
        return parser.decode(
            text if isinstance(text, str) else str(bytes(text).removeprefix(_BYTE_ORDER_MARK), "utf-8")
        )
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
        raise ValueError(shorten_middle(str(error))) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def decode[T](text: str | bytes | bytearray | memoryview, to: type[T]) -> T:
    """Applies :func:`parse`, then :func:`convert`; raises ValueError as they do."""
    return convert(parse(text), to)


class StateError(UserError, ValueError):
    """A saved state does not fit the object that should load it."""

    code = "saved-state-invalid"


def field_values(instance: Any) -> dict[str, Any]:
    """Returns the values of a dataclass by field.

    ``vars()`` lacks the fields of a decoded object that were not in the JSON, whose defaults are in the class.
    """
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}


def convert_state[T](value: Any, to: type[T], owner: str, requires_every_field: bool = False) -> T:
    """Applies :func:`convert` to the state that an object has saved.

    Args:
        value: the state.
        to: type of the state.
        owner: name of the object, for the message.
        requires_every_field: require also the fields of a dataclass that have defaults.

    Raises:
        ValueError: as :func:`convert`.
    """
    try:
        converted = convert(value, to)
        if requires_every_field and (missing := field_values(converted).keys() - value.keys()):
            raise ValueError(f"it lacks {min(missing)}")
        return converted
    except ValueError as error:
        raise StateError(f"this is no state of {owner} ({error}). Fix: start without it") from None


def encode_with_hash(fields: Mapping[str, Any]) -> str:
    """Returns JSON of some fields with their hash, which :func:`decode_verified` verifies."""
    return json.dumps({**fields, _HASH_KEY: _hash_of_fields(fields)})


def decode_verified[T](text: str | bytes, to: type[T]) -> T:
    """Inverts :func:`encode_with_hash`; a text without a hash, from an earlier version, is accepted.

    Raises:
        ValueError: the hash differs, or as :func:`decode`.
    """
    fields = {**require_object(parse(text), "it")}
    digest = fields.pop(_HASH_KEY, None)
    if digest is not None and digest != _hash_of_fields(fields):
        raise ValueError("it does not match its hash")
    return convert(fields, to)


def require_object(value: object, label: str) -> Mapping[str, Any]:
    """Returns a JSON object whose keys are names; like the following functions, raises ValueError otherwise."""
    if not isinstance(value, dict):
        raise ValueError(f"{label} is {short_repr(value)}, and not an object")
    keys = "".join(value)
    if len(keys) > _MAX_NAME_LENGTH or not keys.isprintable():  # one test per object: reports have hundreds
        for key in value:
            require_name(key, f"a key of {label}")
    return value


def require_count(value: object, label: str) -> int:
    """Returns an integer from 0 to :data:`MAX_COUNT`."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{label} is {short_repr(value)}, and not a number from 0 to {MAX_COUNT}")
    return value


def require_name(value: object, label: str) -> str:
    """Returns the text that a terminal shows as it is."""
    if not isinstance(value, str) or len(value) > _MAX_NAME_LENGTH or not value.isprintable():
        raise ValueError(f"{label} is {short_repr(value)}, and no name")
    return value


def require_inner_path(value: object) -> str:
    """Returns the path of a file in the directory of a checkpoint or below."""
    path = PurePosixPath(require_name(value, "a path"))
    if path.is_absolute() or not path.parts or ".." in path.parts:
        raise ValueError(f"{short_repr(value)} is outside of the checkpoint")
    return str(path)


def _object_with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("an object has the same key twice")
    return fields


_STRICT_PARSER = json.JSONDecoder(object_pairs_hook=_object_with_unique_keys)


def _hash_of_fields(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())
