"""Reads command lines and configuration files, and collects all their problems."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from megatron.pretraining.config.flag import UNKNOWN, ConfigError, Problems, refuse
from moc.cli_output import closest, unknown_flag, unknown_word
from moc.errors import with_code
from moc.files.decode import shorten, shorten_middle
from moc.files.safe_directory import MAX_CONFIG_BYTES, open_user_file

_SIMILAR = 0.8
"""Minimum similarity, from 0 to 1, of a word to a suggested flag."""

_MAX_VALUES = 10_000
"""Maximum values of a configuration file; YAML aliases can make exponentially many from a short text."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader, if PyYAML has it

Parse = Callable[[Sequence[str]], tuple[argparse.Namespace, list[str]]]


def read_words(
    parser: argparse.ArgumentParser, argv: Sequence[str], parse: Parse | None = None, ignores_unknown: bool = False
) -> tuple[dict[str, Any], Problems]:
    """Reads a command line.

    Args:
        parser: raises ``ArgumentError``, instead of exiting.
        argv: the words.
        parse: replacement for ``parser.parse_known_args``, the default.
        ignores_unknown: do not report words that no flag takes.

    Returns:
        Values by name, and the problems; values that cannot be read are ``UNKNOWN``.
    """
    problems, words, unreadable = Problems(), list(argv), {}
    while True:
        try:
            known, unknown = (parse or parser.parse_known_args)(words)
            break
        except argparse.ArgumentError as error:
            spellings = (error.argument_name or "").split("/")
            action = parser._option_string_actions[spellings[0]]
            unreadable[action.dest] = UNKNOWN
            flag_word = next(word for word in words if word.partition("=")[0] in spellings)
            problems.found.append(_unreadable(action, flag_word, error.message))
            words = [word for word in words if word.partition("=")[0] not in spellings]
    spellings = {spelling: action.dest for spelling, action in parser._option_string_actions.items()}
    unknown = [word for word in unknown if not (ignores_unknown or unreadable and not word.startswith("-"))]
    misspelled = refuse_unknown(unknown, spellings, problems)
    return {**vars(known), **misspelled, **unreadable}, problems


def _unreadable(action: argparse.Action, word: str, reason: str) -> ConfigError:
    name, _, value = word.partition("=")
    if action.nargs == 0:
        return ConfigError(
            f"{name} takes no value, and has {shorten(value)}. Fix: write {name} alone", code="value-not-taken"
        )
    if reason.startswith("expected"):
        return ConfigError(f"{name} has no value. Fix: give it one; --help has the form", code="value-missing")
    if action.choices is not None:
        choices, reason = [*map(str, action.choices)], reason.partition(" (choose from ")[0]
        close = difflib.get_close_matches(value or _text_in_quotes(reason), choices, n=1, cutoff=_SIMILAR)
        advice = f"write {close[0]}, or another one of" if close else "choose one of"
        return ConfigError(
            f"{name} has an {shorten_middle(reason)}. Fix: {advice} {', '.join(choices)}", code="value-not-a-choice"
        )
    return ConfigError(
        f"{name} has an {shorten_middle(reason)}. Fix: correct it; --help has the form", code="value-unreadable"
    )


def _text_in_quotes(text: str) -> str:
    """Returns the quoted part of an argparse message."""
    return text.partition("'")[2].rpartition("'")[0]


def refuse_unknown(words: Sequence[str], spellings: dict[str, str], problems: Problems) -> dict[str, object]:
    """Adds a problem for each unknown word.

    Args:
        words: the words that no flag takes.
        spellings: names by the spellings of flags.
        problems: receives the problems.

    Returns:
        ``UNKNOWN`` by the name of each flag that is probably meant.
    """
    intended, follows_flag = {}, False
    for word in words:
        if word.startswith("-"):
            follows_flag, name = True, word.partition("=")[0]
            close = closest(name, spellings)
            if close is not None:
                intended[spellings[close]] = UNKNOWN
            problems.found.append(ConfigError(with_code(unknown_flag(name, spellings))))
        elif not follows_flag:
            problems.found.append(ConfigError(with_code(unknown_word(word))))
    return intended


def load_config(path: str | os.PathLike) -> dict:
    """Reads keys and values of a YAML file.

    Raises:
        ConfigError: the file cannot be read, or has other contents.
    """
    try:
        with open(open_user_file(path, MAX_CONFIG_BYTES), encoding="utf-8") as file:
            content = yaml.load(file.read(), _LOADER) or {}  # noqa: S506  # both loaders make only plain values
    except OSError as error:
        raise ConfigError(
            f"--config {path} cannot be read: {error.strerror}. Fix: correct the path", code="config-file-unreadable"
        ) from None
    except RecursionError:
        raise ConfigError(
            f"--config {path} is nested too deeply. Fix: write one key and value a line", code="config-file-unreadable"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        position = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise ConfigError(
            f"--config {path} is not YAML: {position}{shorten_middle(' '.join(problem.split()))}. Fix: correct it",
            code="config-file-unreadable",
        ) from None
    refuse(
        not isinstance(content, dict),
        f"--config {path} does not hold keys and values. Fix: write one key and value a line",
        code="config-file-unreadable",
    )
    refuse(
        _is_larger(content, _MAX_VALUES),
        f"--config {path} has more than {_MAX_VALUES} values, counted where its aliases are. Fix: write fewer",
        code="config-file-unreadable",
    )
    return content


def _is_larger(content: Any, limit: int) -> bool:
    """Returns whether there are more than ``limit`` values, counting each once per reference."""
    pending, count = [content], 0
    while pending and count <= limit:
        value = pending.pop()
        count += 1
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return count > limit
