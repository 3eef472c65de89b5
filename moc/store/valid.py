"""What may be in the JSON of checkpoints: whoever wrote it, reading it ends in values as expected, or in an error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

MOST = 1 << 62
"""Largest number of bytes or elements."""

_LONGEST = 1000  # characters of a name
_FILE = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.+-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{32}")


def parse(text: str | bytes) -> Any:
    """As ``json.loads``; raises ValueError also for text that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def table(value: object, what: str) -> Mapping[str, Any]:
    """An object whose keys are names; raises ValueError for anything else, as all of the following do."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {shown(value)}, and not an object")
    if not _are_names(value):
        for key in value:
            name(key, f"a key of {what}")
    return value


def _are_names(keys: Iterable[str]) -> bool:
    """Whether keys, of JSON, are certainly names: all at once, since reports have hundreds of objects."""
    text = "".join(keys)
    return len(text) <= _LONGEST and text.isprintable()


def number(value: object, what: str, most: int = MOST) -> int:
    """A whole number from 0 to ``most``."""
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} is {shown(value)}, and not a number from 0 to {most}")
    return value


def name(value: object, what: str) -> str:
    """Text that a terminal shows as it is."""
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise ValueError(f"{what} is {shown(value)}, and no name")
    return value


def file_name(value: object) -> str:
    """The name of a file in the directory of a checkpoint itself."""
    if not isinstance(value, str) or not _FILE.fullmatch(value):
        raise ValueError(f"{shown(value)} is no name of a file of a checkpoint")
    return value


def inner_path(value: object) -> str:
    """The path of a file in the directory of a checkpoint or below."""
    path = PurePosixPath(name(value, "a path"))
    if path.is_absolute() or not path.parts or ".." in path.parts:
        raise ValueError(f"{shown(value)} is outside of the checkpoint")
    return str(path)


def digest(value: object, what: str) -> str:
    """An xxh3-128 in hex."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ValueError(f"{what} is {shown(value)}, and no hash")
    return value


def shown(value: object) -> str:
    """A value of unknown origin in a message: short, and without control characters."""
    text = ascii(value) if not isinstance(value, (dict, list)) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
