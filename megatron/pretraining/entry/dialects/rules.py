"""Rules of a dialect's table, which compute the outcome of an option and its values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_MAX_INTEGER = 1 << 62
_NUMBER = re.compile(r"-\.?\d")
_QUOTED = ("--split", "--moe-layer-freq")
"""Options whose values have quotes in scripts that no shell removes."""


class Line:
    """A command line: values by option."""

    def __init__(self, options: Iterable[tuple[str, Sequence[str]]]):
        self._values: dict[str, list[str]] = {}
        for option, values in options:
            self._values.pop(option, None)  # the last occurrence is in force
            self._values[option] = [*values]

    def comes_later(self, option: str, other: str) -> bool:
        """Returns whether both options are given, and ``option`` is after ``other``."""
        order = [*self._values]
        return option in self._values and other in self._values and order.index(option) > order.index(other)

    def __contains__(self, option: str) -> bool:
        return option in self._values

    def text(self, option: str, default: str = "") -> str:
        """Returns the values of an option as one text; the default if it is not given, or has none."""
        return " ".join(self._values.get(option, ())) or default

    def number(self, option: str, default: float | None = None) -> float | None:
        """Returns the value of an option as a number; the default if it is not given, or not one finite number."""
        try:
            number = float(self.text(option))
        except ValueError:
            return default
        return number if math.isfinite(number) else default

    def count(self, option: str, default: int = 0) -> int:
        """Returns the value of an option as an integer; the default if it is missing, not one number, or too large."""
        number = self.number(option)
        return default if number is None or abs(number) > _MAX_INTEGER else int(number)


@dataclass(frozen=True)
class OptionOutcome:
    """The outcome of an option.

    Attributes:
        words: words that replace the option.
        why: reason for ignoring or replacing it; part of a sentence.
        problem: reason for refusing it; empty if it is not refused.
        fix: remedy for a refused option.
    """

    words: tuple[str, ...] = ()
    why: str = ""
    problem: str = ""
    fix: str = "drop it"


Rule = Callable[[Line, Sequence[str]], OptionOutcome]


@dataclass(frozen=True)
class Dialect:
    """The options of a program.

    Attributes:
        name: name for ``--dialect``.
        title: title of the program.
        rules: rules by option.
        defaults: returns options that are not given, and whose default differs from Megatron-LM's.
        marks: options of this release that suggest the dialect if several are equally likely.
        needs_mark: without a mark, any other dialect with one of the options is preferred; with a mark, only a dialect
            with as many options and a mark.
    """

    name: str
    title: str
    rules: Mapping[str, Rule]
    defaults: Callable[[Line], Sequence[OptionOutcome]] = lambda line: ()
    marks: frozenset[str] = frozenset()
    needs_mark: bool = False


def ignored(why: str) -> Rule:
    """Returns a rule for an option without effect here."""
    return lambda line, values: OptionOutcome(why=why)


def refused_option(why: str, fix: str = "drop it") -> Rule:
    """Returns a rule for an option of an unsupported feature."""
    return lambda line, values: OptionOutcome(problem=why, fix=fix)


def renamed(to: str, **of_values: str) -> Rule:
    """Returns a rule for an option with another name; ``of_values`` maps old values, in any case, to new values."""
    table = {old.lower(): new for old, new in of_values.items()}
    return lambda line, values: OptionOutcome((to, *(table.get(value.lower(), value) for value in values)))


def becomes(*words: str, why: str = "") -> Rule:
    """Returns a rule that replaces an option by these words, regardless of its values."""
    return lambda line, values: OptionOutcome(words, why)


def integer(rule: Rule) -> Rule:
    """Returns a rule for an option whose value must be an integer, since no parser checks it afterwards."""

    def checked(line: Line, values: Sequence[str]) -> OptionOutcome:
        try:
            int(" ".join(values))
        except ValueError:
            return OptionOutcome(problem="it is not an integer", fix="correct it")
        return rule(line, values)

    return checked


def of_value(rules: Mapping[str, Rule], default: Rule | None = None) -> Rule:
    """Returns a rule that depends on the value, in any case; ``default`` is the rule for other values.

    Without ``default``, the table must have all possible values.
    """
    table: dict[str, Rule] = {value.lower(): rule for value, rule in rules.items()}

    def rule(line: Line, values: Sequence[str]) -> OptionOutcome:
        return (table.get(" ".join(values).lower()) or default or _missing)(line, values)

    return rule


def same(option: str) -> Rule:
    """Returns a rule for an option that keeps its meaning."""
    return lambda line, values: OptionOutcome((option, *values))


class ParsedOption(NamedTuple):
    """An option of a command line.

    Attributes:
        spelling: spelling of the option; empty for words before the first option.
        values: values of the option.
        words: the words of option and values.
    """

    spelling: str
    values: list[str]
    words: list[str]


def split_options(words: Sequence[str]) -> list[ParsedOption]:
    """Returns the options of a command line, with their values."""
    parsed: list[ParsedOption] = []
    for word in words:
        if word.startswith("-") and not _NUMBER.match(word):
            option, equals, value = word.partition("=")
            parsed.append(ParsedOption(option, [value] if equals else [], [word]))
        else:
            if not parsed:
                parsed.append(ParsedOption("", [], []))
            parsed[-1].values.append(word)
            parsed[-1].words.append(word)
    return [_without_quotes(parsed_option) for parsed_option in parsed]


def _without_quotes(option: ParsedOption) -> ParsedOption:
    """Removes quotes that a shell should have removed."""
    quoted = [value for value in option.values if len(value) > 1 and value[0] == value[-1] and value[0] in "'\""]
    if option.spelling not in _QUOTED or not quoted:
        return option
    values = [value[1:-1] if value in quoted else value for value in option.values]
    return ParsedOption(option.spelling, values, [option.spelling, *values])


def _missing(line: Line, values: Sequence[str]) -> Any:
    raise AssertionError(f"no rule for {' '.join(values)}")
