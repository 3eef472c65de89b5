"""Converts values from the command line, a YAML file, a preset or a test into the type of their field."""

from __future__ import annotations

from typing import Any

from megatron.pretraining.config.flag import ConfigError, Flag, refuse
from moc.files.text import short_repr, shorten


def convert(flag: Flag, value: object) -> object:
    """Returns the value in the type of this flag's field.

    Raises:
        ConfigError: the value does not fit.
    """
    if value is None or _says_none(flag, value):
        refuse(
            flag.default is not None,
            f"{flag.spelling} needs a value. Fix: leave it out for {flag.default}",
            code="value-missing",
        )
        return None
    try:
        result = flag.parse(value) if flag.parse else _BY_KIND[flag.kind](value)
    except (TypeError, ValueError, OverflowError) as error:
        reason, wanted = (
            ("", _WANTED[flag.kind]) if flag.parse is None else (f" ({error})", "a value that --help describes")
        )
        raise ConfigError(
            f"{flag.spelling} {short_repr(value)} is not understood{reason}. Fix: give {wanted}",
            code="value-unreadable",
        ) from None
    if flag.choices and result not in flag.choices:
        raise ConfigError(
            f"{flag.spelling} {shorten(result)} is not available. Fix: choose one of "
            f"{', '.join(map(str, flag.choices))}",
            code="value-not-a-choice",
        )
    return result


def _says_none(flag: Flag, value: object) -> bool:
    """Returns whether the value is ``none``, which resets a number; for a string flag, it could be a name."""
    return flag.default is None and flag.kind in (int, float) and str(value).lower() == "none"


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise TypeError
    return int(value)


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _text(value: object) -> str:
    if isinstance(value, (bool, list, tuple, dict)):
        raise TypeError
    return str(value)


def _texts(value: object) -> tuple[str, ...]:
    items = value.split() if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise TypeError
    return tuple(_text(item) for item in items)


_BY_KIND = {bool: _switch, int: _integer, float: _number, str: _text, tuple: _texts}
_WANTED = {bool: "true or false", int: "an integer", float: "a number", str: "a word", tuple: "words"}
