"""Declares flags as fields of frozen dataclasses, the only place of name, default, help text, limits and conversion."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from moc.errors import FIX, UserError, with_code
from moc.files.decode import short_repr, shorten

_MAX_INTEGER = 1 << 62  # of an integer; larger ones do not fit a float
_LIMITS = {  # by sign
    ">=": (operator.ge, "at least"),
    ">": (operator.gt, "greater than"),
    "<=": (operator.le, "at most"),
    "<": (operator.lt, "less than"),
}


UNKNOWN: Any = object()
"""Placeholder for a missing or invalid value, which a separate problem reports."""


class UnknownValueError(Exception):
    """A check needs a value that is ``UNKNOWN``, and cannot run."""


class ConfigError(UserError, ValueError):
    """Invalid flag or combination of flags; the message is one sentence with the remedy."""

    @property
    def problems(self) -> tuple[ConfigError, ...]:
        """This error, or its parts."""
        return (self,)


class ConfigErrors(ConfigError):
    """Several independent problems of flags, one per line of the message."""

    def __init__(self, problems: Sequence[ConfigError]):
        super().__init__()
        self._problems = tuple(problems)

    @property
    def problems(self) -> tuple[ConfigError, ...]:
        """The problems."""
        return self._problems

    def __str__(self) -> str:
        return "\n".join(map(with_code, self._problems))


def refuse(wrong: object, sentence: str, *, code: str) -> None:
    """Raises ``ConfigError`` with this sentence and code if ``wrong`` is true."""
    if wrong:
        raise ConfigError(sentence, code=code)


class Problems:
    """Collects problems of flags, so that one message reports them together."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    def refuse(self, wrong: object, sentence: str, *, code: str) -> bool:
        """Adds a problem if ``wrong`` is true; returns whether it is."""
        if wrong:
            self.found.append(ConfigError(sentence, code=code))
        return bool(wrong)

    def refuse_remainder(self, name: str, value: int | None, of: str, divisor: int | None) -> None:
        """Adds a problem unless one flag's value is a multiple of another's, or one is None."""
        self.refuse(
            value and divisor and value % divisor,
            f"{dashed(name)} {value} is not a multiple of {dashed(of)} {divisor}. Fix: change one of them",
            code="flag-not-a-multiple",
        )

    def refuse_without(self, spellings: Sequence[str], other: str) -> None:
        """Adds a problem if any of these flags is given, which have no effect without another flag."""
        self.refuse(
            spellings,
            f"{listed(spellings)} {'has' if len(spellings) == 1 else 'have'} no effect without {other}. "
            f"Fix: add it, or drop {listed(spellings)}",
            code="flag-has-no-effect",
        )

    def check[**P](self, check: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Runs a check, and adds the problems that it raises; returns whether it was completed.

        A check that needs an unknown value ends there.
        """
        try:
            check(*args, **kwargs)
        except UnknownValueError:
            return False
        except ConfigError as error:
            self.found += error.problems
            return False
        except UserError as error:  # for example of an installed policy
            self.found.append(ConfigError(str(error), code=error.code))
            return False
        return True

    def raise_found(self) -> None:
        """Raises ``ConfigError`` if there is a problem."""
        problems = list({str(problem): problem for problem in self.found}.values())
        if problems:
            raise problems[0] if len(problems) == 1 else ConfigErrors(problems)


def listed(words: Sequence[str]) -> str:
    """Joins words with commas, and "and" before the last one."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def dashed(name: str) -> str:
    """Returns the spelling of a field's flag."""
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
        default: the value if the flag is not given.  None is a legal value only where it is the default.
        help: the flag's effect: the text of ``--help`` and the documentation of the field.
        spellings: further spellings.  Those of a switch that begin with ``--no-`` or ``--disable-`` turn it off, and
            replace the ``--no-`` spelling made from the field's name.
        choices: allowed values.
        type: parses a value, raising ``ValueError``, if the annotation does not suffice.
        nargs: as in argparse, for fields that hold a tuple.
        metavar: name of the value in ``--help``.
        limits: limits of a number, such as ``>= 0, < 1``.
    """
    facts = dict(
        default=default,
        help=" ".join(help.split()),
        spellings=spellings,
        choices=tuple(choices) if choices else None,
        parse=type,
        nargs=nargs,
        metavar=metavar,
        limits=tuple((sign, float(number), number) for sign, number in map(str.split, filter(None, limits.split(",")))),
    )
    # no class attribute with the default: a group without a value must not appear to have one
    return dataclasses.field(default_factory=lambda: facts["default"], metadata=facts)


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag, as read back from a field."""

    name: str
    kind: type
    """bool, int, float, str or tuple (of str)."""
    default: object
    help: str
    on: tuple[str, ...]
    """Spellings that set it, or turn a switch on."""
    off: tuple[str, ...]
    """Spellings that turn a switch off; empty for flags with a value."""
    choices: tuple | None
    parse: Callable[[object], object] | None
    nargs: str | None
    metavar: str | None
    limits: tuple[tuple[str, float, str], ...]
    """Sign, number, and the number as written."""

    @property
    def spelling(self) -> str:
        """Spelling for messages."""
        return self.off[0] if self.off and self.default else self.on[0]

    def check(self, value: object) -> None:
        """Raises ``ConfigError`` for a number outside the flag's limits."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        refuse(
            isinstance(value, int) and abs(value) > _MAX_INTEGER,
            f"{self.spelling} is {shorten(value)}. Fix: give a number that is at most {_MAX_INTEGER}",
            code="value-out-of-range",
        )
        refuse(
            not math.isfinite(value),
            f"{self.spelling} is {value}. Fix: give a finite number",
            code="value-out-of-range",
        )
        for sign, limit, written in self.limits:
            compare, phrase = _LIMITS[sign]
            refuse(
                not compare(value, limit),
                f"{self.spelling} is {value}. Fix: give a number that is {phrase} {written}",
                code="value-out-of-range",
            )


@dataclasses.dataclass(frozen=True)
class FlagGroup:
    """Base class of flag groups: checks the value of every field, then calls ``validate``."""

    def __post_init__(self) -> None:
        problems = Problems()
        self._find_problems(problems)
        problems.raise_found()

    @classmethod
    def of_values(cls, values: Mapping[str, object], problems: Problems) -> Self:
        """Returns a group of values by field, and adds its problems.

        A field whose value is invalid or ``UNKNOWN`` raises ``UnknownValueError`` when it is read.
        """
        group = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(group, name, value)
        group._find_problems(problems)
        return group

    def _find_problems(self, problems: Problems) -> None:
        """Adds the problems of this group, and deletes fields without a valid value."""
        for spec in flags_of(type(self)):
            value = getattr(self, spec.name)
            if value is UNKNOWN or not problems.check(spec.check, value):
                object.__delattr__(self, spec.name)
        problems.check(self.validate, problems)

    def validate(self, problems: Problems) -> None:
        """Adds the problems of fields of this group that contradict each other."""

    def needs(self, problems: Problems, name: str, other: str) -> None:
        """Refuses a flag without another one."""

        def check() -> None:
            other_value = getattr(self, other)
            refuse(
                getattr(self, name) and not other_value,
                f"{dashed(name)} needs {dashed(other)}. Fix: add it",
                code="flag-needs-another",
            )

        problems.check(check)

    if not typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in {spec.name for spec in flags_of(type(self))}:
                raise UnknownValueError(name)
            raise AttributeError(name)


@functools.cache
def flags_of(group: Any) -> tuple[Flag, ...]:
    """Returns the flags of a group in order, without its copies of Megatron-LM's arguments."""
    hints = typing.get_type_hints(group)
    return tuple(_read(field, _kind(hints[field.name])) for field in dataclasses.fields(group) if field.metadata)


def _read(field: dataclasses.Field, kind: type) -> Flag:
    facts = dict(field.metadata)
    extra, off = facts.pop("spellings"), ()
    if kind is bool:
        off = tuple(s for s in extra if s.startswith(("--no-", "--disable-"))) or (dashed(f"no_{field.name}"),)
    on = (dashed(field.name), *(s for s in extra if s not in off))
    return Flag(name=field.name, kind=kind, on=on, off=off, **facts)


def _kind(hint: Any) -> type:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.get_origin(hint) or hint


def convert_value(flag: Flag, value: object) -> object:
    """Returns the value in the type of this flag's field.

    Raises:
        ConfigError: the value does not fit.
    """
    if value is None or _is_none(flag, value):
        refuse(
            flag.default is not None,
            f"{flag.spelling} needs a value. Fix: leave it out for {flag.default}",
            code="value-missing",
        )
        return None
    try:
        result = flag.parse(value) if flag.parse else _PARSERS[flag.kind](value)
    except (TypeError, ValueError, OverflowError) as error:
        cause, _, remedy = str(error).partition(FIX)
        reason = "" if flag.parse is None else f" ({cause})"
        if not remedy:
            remedy = f"give {_EXPECTED[flag.kind] if flag.parse is None else 'a value that --help describes'}"
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        raise ConfigError(
            f"{flag.spelling} {short_repr(shown)} is not understood{reason}. Fix: {remedy}",
            code="value-unreadable",
        ) from None
    if flag.choices and result not in flag.choices:
        raise ConfigError(
            f"{flag.spelling} {shorten(result)} is not available. Fix: choose one of "
            f"{', '.join(map(str, flag.choices))}",
            code="value-not-a-choice",
        )
    return result


def _is_none(flag: Flag, value: object) -> bool:
    """Returns whether the value is ``none``, which resets a number; for a string flag, it could be a name."""
    return flag.default is None and flag.kind in (int, float) and str(value).lower() == "none"


def _parse_switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _parse_integer(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and value != int(value)):
        raise TypeError
    return int(value)


def _parse_number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _parse_text(value: object) -> str:
    if isinstance(value, (bool, list, tuple, dict)) or value == "":
        raise TypeError
    return str(value)


def _parse_texts(value: object) -> tuple[str, ...]:
    items = value.split() if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise TypeError
    return tuple(_parse_text(item) for item in items)


_PARSERS = {bool: _parse_switch, int: _parse_integer, float: _parse_number, str: _parse_text, tuple: _parse_texts}
_EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "a word", tuple: "words"}
