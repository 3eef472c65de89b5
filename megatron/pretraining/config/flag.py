"""A flag is a field of a frozen dataclass, which alone declares its name, default, help text and limits."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

from moc.errors import UserError

REQUIRED: Any = object()
"""Default of a flag that has no useful one: leaving it out is an error."""
_LIMITS = {  # by sign
    ">=": (operator.ge, "at least"),
    ">": (operator.gt, "greater than"),
    "<=": (operator.le, "at most"),
    "<": (operator.lt, "less than"),
}


class ConfigError(UserError, ValueError):
    """Invalid flags, alone or in combination; the message is one sentence that says what to change."""


def refuse(wrong: object, sentence: str) -> None:
    """Raises ``ConfigError`` with this sentence if ``wrong`` is true."""
    if wrong:
        raise ConfigError(sentence)


def refuse_remainder(name: str, value: int | None, of: str, divisor: int | None) -> None:
    """Raises ``ConfigError`` unless one flag's value is a multiple of another's, or one is None."""
    refuse(
        value and divisor and value % divisor,
        f"{dashed(name)} {value} is not a multiple of {dashed(of)} {divisor}: change one of them.",
    )


def dashed(name: str) -> str:
    """The spelling of a field's flag."""
    return f"--{name.replace('_', '-')}"


def flag(
    default: Any,
    help: str,
    *spellings: str,
    choices: Sequence | None = None,
    type: Callable[[Any], object] | None = None,
    nargs: str | None = None,
    metavar: str | None = None,
    limits: str = "",
) -> Any:
    """Declares a field that is also a flag, of the field's type.

    Field ``hidden_size`` is spelled ``--hidden-size``; a switch is also spelled ``--no-hidden-size``.

    Args:
        default: the value when nobody gives one, or ``REQUIRED``.  None is a legal value only where it is the default.
        help: what the flag does: the text of ``--help`` and the documentation of the field.
        spellings: further ones.  On a switch, those that begin with ``--no-`` or ``--disable-`` turn it off,
            and stand in place of the ``--no-`` spelling made from the field's name.
        choices: the values allowed.
        type: parses a value, raising ``ValueError``, where the annotation does not say enough.
        nargs: as in argparse, for fields that hold a tuple.
        metavar: what ``--help`` calls the value.
        limits: of a number, such as ``>= 0, < 1``.
    """
    facts = dict(
        help=" ".join(help.split()),
        spellings=spellings,
        choices=tuple(choices) if choices else None,
        parse=type,
        nargs=nargs,
        metavar=metavar,
        required=default is REQUIRED,
        limits=tuple((sign, float(number), number) for sign, number in map(str.split, filter(None, limits.split(",")))),
    )
    return dataclasses.field(default=None if default is REQUIRED else default, metadata=facts)


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag, as read back from a field."""

    name: str
    kind: type
    """bool, int, float, str or tuple (of str)."""
    default: object
    help: str
    on: tuple[str, ...]
    """Spellings that set it; for a switch, that turn it on."""
    off: tuple[str, ...]
    """Spellings that turn a switch off; empty for flags with a value."""
    choices: tuple | None
    parse: Callable[[object], object] | None
    nargs: str | None
    metavar: str | None
    required: bool
    limits: tuple[tuple[str, float, str], ...]
    """Sign, number, and the number as written."""

    @property
    def spelling(self) -> str:
        """The spelling for messages."""
        return self.off[0] if self.off and self.default else self.on[0]

    def check_limits(self, value: object) -> None:
        """Rejects a number outside the flag's limits."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        refuse(not math.isfinite(value), f"{self.spelling} must be a number, not {value}.")
        for sign, limit, written in self.limits:
            holds, words = _LIMITS[sign]
            refuse(not holds(value, limit), f"{self.spelling} must be {words} {written}, not {value}.")


class FlagGroup:
    """Base class of flag groups: checks the limits of every field, then calls ``validate``."""

    preset: typing.ClassVar[bool] = False
    """Whether model presets set fields of this group."""

    def __post_init__(self) -> None:
        for spec in flags_of(type(self)):
            value = getattr(self, spec.name)
            refuse(
                spec.required and value is None,
                f"{spec.spelling} is missing: give it, on the command line or in the --config file"
                f"{' or by a --model preset' if type(self).preset else ''}.",
            )
            spec.check_limits(value)
        self.validate()

    def validate(self) -> None:
        """Raises ``ConfigError`` if fields of this group contradict each other."""

    def needs(self, name: str, other: str, value: object = None) -> None:
        """Refuses a flag without another one, or without this value of it."""
        there = getattr(self, other)
        refuse(
            getattr(self, name) and (not there if value is None else there != value),
            f"{dashed(name)} needs {dashed(other)}{'' if value is None else f' {value}'}: add it.",
        )

    def multiple(self, name: str, of: str) -> None:
        """Refuses a number that is not a multiple of another one."""
        refuse_remainder(name, getattr(self, name), of, getattr(self, of))

    def at_most(self, name: str, other: str) -> None:
        """Refuses a number greater than another one."""
        value, limit = getattr(self, name), getattr(self, other)
        refuse(
            value is not None and limit is not None and value > limit,
            f"{dashed(name)} {value} is more than {dashed(other)} {limit}: lower it.",
        )


@functools.cache
def flags_of(group: type) -> tuple[Flag, ...]:
    """The flags of a group, in order."""
    hints = typing.get_type_hints(group)
    return tuple(_read(field, _kind(hints[field.name])) for field in dataclasses.fields(group))


def _read(field: dataclasses.Field, kind: type) -> Flag:
    facts = dict(field.metadata)
    extra, off = facts.pop("spellings"), ()
    if kind is bool:
        off = tuple(s for s in extra if s.startswith(("--no-", "--disable-"))) or (dashed(f"no_{field.name}"),)
    on = (dashed(field.name), *(s for s in extra if s not in off))
    return Flag(name=field.name, kind=kind, default=field.default, on=on, off=off, **facts)


def _kind(hint: Any) -> type:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.get_origin(hint) or hint
