"""What a dialect's table consists of: rules, which make an outcome of an option and its values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_LARGEST = 1 << 62
_NUMBER = re.compile(r"-\.?\d")
_QUOTED = ("--split", "--moe-layer-freq")
"""Options whose values scripts have in quotes that no shell removes."""


class Line:
    """A command line: values by option."""

    def __init__(self, options: Iterable[tuple[str, Sequence[str]]]):
        self._values: dict[str, list[str]] = {}
        for option, values in options:
            self._values.pop(option, None)  # the last one is in force
            self._values[option] = [*values]

    def comes_later(self, option: str, other: str) -> bool:
        """Whether an option comes after another one, and both are given."""
        places = [*self._values]
        return option in self._values and other in self._values and places.index(option) > places.index(other)

    def __contains__(self, option: str) -> bool:
        return option in self._values

    def text(self, option: str, default: str = "") -> str:
        """The values of an option as one text; the default if it is not given, or has none."""
        return " ".join(self._values.get(option, ())) or default

    def number(self, option: str, default: float | None = None) -> float | None:
        """The value of an option as a number; the default if it is not given, or not one finite number."""
        try:
            number = float(self.text(option))
        except ValueError:
            return default
        return number if math.isfinite(number) else default

    def count(self, option: str, default: int = 0) -> int:
        """The value of an option as an integer; the default if it is not given, or not one number that can count."""
        number = self.number(option)
        return default if number is None or abs(number) > _LARGEST else int(number)


@dataclass(frozen=True)
class Outcome:
    """What becomes of an option.

    Attributes:
        words: in its place.
        why: it is ignored or has these words; part of a sentence.
        problem: why it is refused; empty if it is not.
        fix: what to do then.
    """

    words: tuple[str, ...] = ()
    why: str = ""
    problem: str = ""
    fix: str = "drop it"


Rule = Callable[[Line, Sequence[str]], Outcome]


@dataclass(frozen=True)
class Dialect:
    """The options of a program.

    Attributes:
        name: for ``--dialect``.
        title: of the program.
        rules: by option.
        defaults: options that have another default than in Megatron-LM, and were not given.
        marks: options of this release that suggest the dialect if several are equally likely.
        needs_mark: without a mark, a dialect that has any of the options is likelier; with one, a dialect that has as
            many and a mark.
    """

    name: str
    title: str
    rules: Mapping[str, Rule]
    defaults: Callable[[Line], Sequence[Outcome]] = lambda line: ()
    marks: frozenset[str] = frozenset()
    needs_mark: bool = False


def ignored(why: str) -> Rule:
    """The option has no effect here."""
    return lambda line, values: Outcome(why=why)


def refused(why: str, fix: str = "drop it") -> Rule:
    """The option asks for something that does not exist here."""
    return lambda line, values: Outcome(problem=why, fix=fix)


def renamed(to: str, **of_values: str) -> Rule:
    """The option has another name; ``of_values`` are new values by old ones, which are compared without case."""
    table = {old.lower(): new for old, new in of_values.items()}
    return lambda line, values: Outcome((to, *(table.get(value.lower(), value) for value in values)))


def becomes(*words: str, why: str = "") -> Rule:
    """The option is these words, whatever its values."""
    return lambda line, values: Outcome(words, why)


def integer(rule: Rule) -> Rule:
    """The rule for an option whose value must be an integer; no parser reads it afterwards."""

    def checked(line: Line, values: Sequence[str]) -> Outcome:
        try:
            int(" ".join(values))
        except ValueError:
            return Outcome(problem="it is not an integer", fix="correct it")
        return rule(line, values)

    return checked


def of_value(rules: Mapping[str, Rule], other: Rule | None = None) -> Rule:
    """The rule depends on the value, which is compared without case; of others, it is ``other``, or the same words.

    An option whose name differs needs ``other``.
    """
    table: dict[str, Rule] = {value.lower(): rule for value, rule in rules.items()}

    def rule(line: Line, values: Sequence[str]) -> Outcome:
        return (table.get(" ".join(values).lower()) or other or _missing)(line, values)

    return rule


def same(option: str) -> Rule:
    """The option keeps its meaning."""
    return lambda line, values: Outcome((option, *values))


class Given(NamedTuple):
    """An option of a command line.

    Attributes:
        option: its spelling; empty for words before the first option.
        values: its values.
        words: the words of both.
    """

    option: str
    values: list[str]
    words: list[str]


def options_of(words: Sequence[str]) -> list[Given]:
    """The options of a command line, with their values."""
    found: list[Given] = []
    for word in words:
        if word.startswith("-") and not _NUMBER.match(word):
            option, equals, value = word.partition("=")
            found.append(Given(option, [value] if equals else [], [word]))
        else:
            if not found:
                found.append(Given("", [], []))
            found[-1].values.append(word)
            found[-1].words.append(word)
    return [_without_quotes(given) for given in found]


def _without_quotes(given: Given) -> Given:
    """Removes quotes that a shell should have removed."""
    quoted = [value for value in given.values if len(value) > 1 and value[0] == value[-1] and value[0] in "'\""]
    if given.option not in _QUOTED or not quoted:
        return given
    values = [value[1:-1] if value in quoted else value for value in given.values]
    return Given(given.option, values, [given.option, *values])


def _missing(line: Line, values: Sequence[str]) -> Any:
    raise AssertionError(f"no rule for {' '.join(values)}")
