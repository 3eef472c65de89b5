"""The command line of Megatron-LM's scripts: its options and ours, files of options, and all problems in one message.

Megatron-LM's ``parse_args`` and ``validate_args`` are wrapped.  The first receives a parser that knows our options and
collects problems of words; the second adds what Megatron-LM, this project's loop and its policies refuse.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from megatron.pretraining.config import ConfigError
from megatron.pretraining.config.flag import UNKNOWN, Problems
from megatron.pretraining.entry import cpu, options
from megatron.pretraining.entry.configuration import config_of
from megatron.pretraining.entry.own_flags import PREFIX, add_own_flags
from megatron.pretraining.entry.stock_loop import refuse_arguments
from megatron.pretraining.errors import reported
from megatron.pretraining.process.rank0 import is_first_worker
from megatron.pretraining.words import load_config, read_words, refuse_unknown
from moc.files.text import short, shown
from moc.output import print_lines
from moc.runtime import script_check


@dataclass(frozen=True)
class CommandLine:
    """A command line that was read.

    Attributes:
        own: values of our options, by name of the flag.
        given: values that differ from the defaults, by name.
        problems: of words and files.
        concealed: names whose values the problems conceal.
        prints: the values are printed instead of training.
    """

    own: Mapping[str, object] = field(default_factory=dict)
    given: Mapping[str, object] = field(default_factory=dict)
    problems: tuple[ConfigError, ...] = ()
    concealed: frozenset[str] = frozenset()
    prints: bool = False


_read = CommandLine()


def own_values() -> dict[str, object]:
    """The values of our options on the command line that was read last."""
    return dict(_read.own)


class _Formatter(argparse.HelpFormatter):
    """Formats help texts; some of Megatron-LM's have a percent sign that argparse cannot expand."""

    def _expand_help(self, action: argparse.Action) -> str:
        try:
            return super()._expand_help(action)
        except (KeyError, TypeError, ValueError):
            return action.help or ""


class _Parser(argparse.ArgumentParser):
    """Megatron-LM's parser with our options; it collects problems instead of exiting at the first one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reads the words, and the files that they name; nothing is left over."""
        global _read
        words = sys.argv[1:] if args is None else list(args)
        self.exit_on_error = False
        values, problems = read_words(self, words, super().parse_known_args)
        if values[f"{PREFIX}help_all"]:
            self.print_help(sys.__stdout__)
            self.exit(0)
        files = values[f"{PREFIX}config"]
        if files and files is not UNKNOWN:
            words = [*_words_of_files(self, files, problems), *words]
            values, _ = read_words(self, words, super().parse_known_args)
        concealed = frozenset(name for name, value in values.items() if value is UNKNOWN)
        defaults = {action.dest: action.default for action in self._actions}
        values |= {name: defaults[name] for name in concealed}
        own = {name.removeprefix(PREFIX): values.pop(name) for name in [*values] if name.startswith(PREFIX)}
        prints = bool(own.pop("print_config"))
        own = {name: value for name, value in own.items() if name not in ("config", "help_all")}
        given = {name: value for name, value in values.items() if value not in (None, defaults.get(name))} | own
        _read = CommandLine(own, given, tuple(problems.found), concealed, prints)
        return argparse.Namespace(**values), []

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        try:
            return super()._get_value(action, arg_string)  # pyright: ignore[reportAttributeAccessIssue]
        except KeyError:  # names of Megatron-LM's enumerations
            raise argparse.ArgumentError(action, f"invalid value: {arg_string!r}") from None


def parse_args(real: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    """Megatron-LM's ``parse_args``, which understands our options as well."""

    @functools.wraps(real)
    def parse(extra_args_provider=None, ignore_unknown_args=False):
        def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            options.remember(real.__code__.co_filename, parser._option_string_actions)
            parser = add_own_flags(parser if extra_args_provider is None else extra_args_provider(parser))
            parser.__class__, parser.formatter_class = _Parser, _Formatter
            return parser

        return real(provider, ignore_unknown_args)

    return parse


def validate_args(real: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron-LM's ``validate_args``, which reports everything that is wrong with the options in one message.

    A script that only has to be checked ends here.
    """

    @functools.wraps(real)
    def validate(args, defaults=None):
        problems = Problems()
        problems.found += _read.problems
        if not _read.concealed:
            try:
                real(args, defaults or {})
            except Exception as error:
                problems.found.append(_refusal_of(error))
            else:
                problems.check(config_of, args, _read.own)
        problems.check(refuse_arguments, args)
        problems.check(cpu.refuse_models, args)
        with reported(Path(sys.argv[0]).name):
            problems.raise_found()
        if _read.prints:
            if is_first_worker():
                with contextlib.redirect_stdout(sys.__stdout__):
                    print_lines(*described())
            sys.exit(0)
        script_check.checked()
        return args

    return validate


def set_global_variables(real: Callable[..., None]) -> Callable[..., None]:
    """Megatron-LM's ``set_global_variables``, which builds tokenizer and writers of logs; its errors are sentences."""

    @functools.wraps(real)
    def set_up(args, *more: Any, **options: Any) -> None:
        with reported(Path(sys.argv[0]).name):
            try:
                real(args, *more, **options)
            except Exception as error:
                raise ConfigError(
                    f"Megatron-LM cannot set up the tokenizer {args.tokenizer_type} or the writers of logs "
                    f"({type(error).__name__}: {_cause_of(error)}). Fix: correct the options of tokenizer and logging",
                    code="tokenizer-unusable",
                ) from error

    return set_up


def print_args(title: str, args: argparse.Namespace) -> None:
    """Prints the options that differ from the defaults, in the place of Megatron-LM's list of all arguments."""
    if is_first_worker():
        print_lines("options that differ from Megatron-LM's defaults:", *(f"  {line}" for line in described()))


def described() -> list[str]:
    """The values that differ from the defaults, as lines of a file for ``--config``."""
    plain = {name: _plain(value) for name, value in sorted(_read.given.items())}
    return yaml.safe_dump(plain, sort_keys=False).rstrip("\n").split("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _refusal_of(error: Exception) -> ConfigError:
    """What Megatron-LM refuses; of an assertion without a sentence, the condition."""
    return ConfigError(
        f"Megatron-LM refuses the options: {_cause_of(error)}. Fix: change the options that it names",
        code="megatron-options-refused",
    )


def _cause_of(error: Exception) -> str:
    cause = " ".join(str(error).split())
    if not cause:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        lines = range(frame.lineno or 0, (frame.end_lineno or frame.lineno or 0) + 1)
        cause = " ".join(linecache.getline(frame.filename, number).strip() for number in lines)
    return cause.rstrip(".")


def _words_of_files(parser: argparse.ArgumentParser, files: Sequence[str], problems: Problems) -> Iterator[str]:
    """The options of files as words of a command line."""
    by_name: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        for name in {action.dest.removeprefix(PREFIX), *map(_underscored, action.option_strings)}:
            by_name.setdefault(name, []).append(action)
    for file in files:
        content: dict[str, Any] = {}
        problems.check(lambda file=file, content=content: content.update(load_config(file)))
        for key, value in content.items():
            actions = by_name.get(_underscored(key))
            if actions is None:
                refuse_unknown([f"--{key}"], {f"--{name}": name for name in by_name}, problems)
            elif value is not None:
                yield from _words_of(actions, value, f"{short(key)} in {file}", problems)


def _words_of(actions: Sequence[argparse.Action], value: Any, named: str, problems: Problems) -> Iterator[str]:
    action = actions[0]
    if action.nargs == 0:
        for one in actions:
            for spelling in one.option_strings:
                found = argparse.Namespace()
                one(_Parser(), found, [], spelling)
                if getattr(found, one.dest) == value:
                    yield spelling
                    return
        if value != action.default:
            problems.refuse(True, f"{named} is {shown(value)}. Fix: make it true or false", code="value-unreadable")
    elif action.nargs is None:
        yield f"{action.option_strings[0]}={value}"
    else:
        yield action.option_strings[0]
        yield from map(str, value if isinstance(value, list) else [value])


def _underscored(key: object) -> str:
    return str(key).removeprefix("--").replace("-", "_")
