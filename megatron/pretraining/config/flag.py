"""A flag is a field of a frozen dataclass, which alone declares its name, default, help text and limits."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any

_METADATA = "flag"


class ConfigError(ValueError):
    """Invalid flags, alone or in combination; the message is one sentence that says what to change."""


def refuse(wrong: object, sentence: str) -> None:
    """Raises ``ConfigError`` with this sentence if ``wrong`` is true."""
    if wrong:
        raise ConfigError(sentence)


def flag(
    default: Any,
    help: str,
    *spellings: str,
    choices: Sequence | None = None,
    type: Callable[[Any], object] | None = None,
    nargs: str | None = None,
    metavar: str | None = None,
    required: bool = False,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """Declares a field that is also a flag.

    Field ``hidden_size`` is spelled ``--hidden-size``; a switch is also spelled ``--no-hidden-size``.

    Its type is that of the field, which a type checker cannot follow.

    Args:
        default: the value when nobody gives one.  None is a legal value only where it is the default.
        help: what the flag does: the text of ``--help`` and the documentation of the field.
        spellings: further ones.  On a switch, those that begin with ``--no-`` or ``--disable-`` turn it off,
            and stand in place of the ``--no-`` spelling made from the field's name.
        choices: the values allowed.
        type: parses a value, raising ``ValueError``, where the annotation does not say enough.
        nargs: as in argparse, for fields that hold a tuple.
        metavar: what ``--help`` calls the value.
        required: there is no useful default; leaving it out is an error.
        at_least: inclusive lower limit.
        above: exclusive lower limit.
        at_most: inclusive upper limit.
        below: exclusive upper limit.
    """
    facts = dict(
        help=" ".join(help.split()),
        spellings=spellings,
        choices=tuple(choices) if choices else None,
        parse=type,
        nargs=nargs,
        metavar=metavar,
        required=required,
        limits=(at_least, above, at_most, below),
    )
    return dataclasses.field(default=default, metadata={_METADATA: facts})


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
    limits: tuple[float | None, float | None, float | None, float | None]

    @property
    def spelling(self) -> str:
        """The spelling for messages."""
        return self.off[0] if self.off and self.default else self.on[0]

    def check_limits(self, value: object) -> None:
        """Rejects a number outside the flag's limits."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        at_least, above, at_most, below = self.limits
        refuse(not math.isfinite(value), f"{self.spelling} must be a number, not {value}.")
        refuse(at_least is not None and value < at_least, self._must(f"at least {at_least}", value))
        refuse(above is not None and value <= above, self._must(f"greater than {above}", value))
        refuse(at_most is not None and value > at_most, self._must(f"at most {at_most}", value))
        refuse(below is not None and value >= below, self._must(f"less than {below}", value))

    def _must(self, limit: str, value: object) -> str:
        return f"{self.spelling} must be {limit}, not {value}."


class FlagGroup:
    """Base class of flag groups: checks the limits of every field, then calls ``validate``."""

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

    preset: typing.ClassVar[bool] = False
    """Whether model presets set fields of this group."""

    def validate(self) -> None:
        """Raises ``ConfigError`` if fields of this group contradict each other."""


@functools.cache
def flags_of(group: type) -> tuple[Flag, ...]:
    """The flags of a group, in order."""
    hints = typing.get_type_hints(group)
    return tuple(_read(field, _kind(hints[field.name])) for field in dataclasses.fields(group))


def _read(field: dataclasses.Field, kind: type) -> Flag:
    facts = dict(field.metadata[_METADATA])
    dashed = field.name.replace("_", "-")
    extra = facts.pop("spellings")
    off: tuple[str, ...] = ()
    if kind is bool:
        off = tuple(s for s in extra if s.startswith(("--no-", "--disable-"))) or (f"--no-{dashed}",)
    on = (f"--{dashed}", *(s for s in extra if s not in off))
    return Flag(name=field.name, kind=kind, default=field.default, on=on, off=off, **facts)


def _kind(hint: Any) -> type:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.get_origin(hint) or hint
