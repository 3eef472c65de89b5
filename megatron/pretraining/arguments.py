"""The command line: flags, presets and YAML files become a ``Config``.  No argparse namespace leaves this module."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import yaml

from megatron.pretraining.config.composed import Config, all_flags, compose, group_classes
from megatron.pretraining.config.ds_config import settings_in
from megatron.pretraining.config.flag import UNKNOWN, ConfigError, Flag, Problems, flags_of, refuse
from megatron.pretraining.config.world import Workers, check_start
from megatron.pretraining.presets import PRESETS
from megatron.pretraining.process.rank0 import is_first_worker, let_first_worker_speak
from moc.errors import with_code
from moc.files.text import short, shown, without_middle
from moc.files.tree import CONFIG, open_named
from moc.output import Parser, print_lines

_SIMILAR = 0.8
"""Least similarity of a word to a flag that is suggested, from 0 to 1."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, where PyYAML has it
# Alternative flags: one given by a stronger source displaces all of its set in the weaker ones.
_ALTERNATIVES = (
    {"moe_layer_freq", "expert_interval"},
    {"train_iters", "train_samples"},
    {"num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"},
    {"data_path", "mock_data"},
    {"bf16", "fp16"},
)


def parse_config(argv: Sequence[str] | None = None, workers: Workers | None = None) -> Config:
    """Reads the flags; ``argv`` defaults to that of the process.

    The ``--model`` preset overrides defaults, ``--config`` files the preset, and the command line the files.  If the
    flags are invalid, or do not fit the number of workers, it prints one line for each problem and exits with code 2.
    It exits with 0 after ``--help`` and ``--print-config``.
    """
    parser = build_parser()
    try:
        given, problems = _read_words(parser, sys.argv[1:] if argv is None else argv)
        config = _resolve(given, problems, workers)
    except ConfigError as error:
        parser.refuse(error)
    if given.get("print_config"):
        if is_first_worker():
            print_lines(*config.to_yaml().removesuffix("\n").split("\n"))
        parser.exit(0)
    return config


def valid_config(argv: Sequence[str]) -> Config | None:
    """Reads the flags without printing anything; None if they are invalid, which the workers report."""
    try:
        return _resolve(*_read_words(build_parser(), [word for word in argv if word not in ("-h", "--help")]))
    except ConfigError:
        return None


def build_parser() -> _Parser:
    """The parser of all flags; its result omits flags that are not given."""
    parser = _Parser(
        usage="%(prog)s [--model NAME] [--config FILE.yaml] [flags]",
        description="Pre-trains a Mixture-of-Experts GPT.",
        epilog='A number without a default is undone by the word "none", as in --num-experts none.',
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--model", metavar="NAME", help=f"Start from this model: {', '.join(PRESETS)}.")
    parser.add_argument(
        "--config",
        action="append",
        metavar="FILE.yaml",
        help="Start from the flags in this file; of several files, a later one overrides an earlier one.",
    )
    parser.add_argument(
        "--front",
        choices=("moc", "megatron"),
        default=argparse.SUPPRESS,
        help="Which flags and which builder of model and data: this program's (moc), or Megatron-LM's, with all of its "
        "flags (megatron; docs/how-to/megatron-lm.md).",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="Print all flags in force, with those that follow from others, as a file for --config; exit.",
    )
    for group in group_classes().values():
        title, _, description = (group.__doc__ or "").partition(": ")
        box = parser.add_argument_group(title.rstrip("."), description[:1].upper() + description[1:])
        for flag in flags_of(group):
            add_flag(box, flag, flag.name)
    return parser


class _Parser(Parser):
    """Reports an error by rank 0 alone: under a launcher all workers find the same one."""

    def refuse(self, error: ConfigError) -> NoReturn:
        """Prints the usage, and a line for each problem; exits with code 2."""
        let_first_worker_speak()
        self.print_usage(sys.stderr)
        print_lines(*(f"{self.prog}: error: {with_code(one)}" for one in error.problems), error=True, flush=True)
        self.exit(2)


def _read_words(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[dict[str, Any], Problems]:
    """The values given on a command line, and the problems of its words; values that these conceal are ``UNKNOWN``."""
    problems, words, unreadable = Problems(), list(argv), {}
    while True:
        try:
            known, unknown = parser.parse_known_args(words)
            break
        except argparse.ArgumentError as error:
            spellings = (error.argument_name or "").split("/")
            action = parser._option_string_actions[spellings[0]]
            unreadable[action.dest] = UNKNOWN
            found = next(word for word in words if word.partition("=")[0] in spellings)
            name, _, value = found.partition("=")
            if action.nargs == 0:
                problems.refuse(
                    True, f"{name} takes no value, and has {value}. Fix: write {name} alone", code="value-not-taken"
                )
            else:
                problems.refuse(
                    True, f"{name} has no value. Fix: give it one; --help has the form", code="value-missing"
                )
            words = [word for word in words if word.partition("=")[0] not in spellings]
    misspelled = _refuse_unknown([word for word in unknown if not unreadable or word.startswith("-")], problems)
    return {**vars(known), **misspelled, **unreadable}, problems


def _refuse_unknown(words: Sequence[str], problems: Problems) -> dict[str, object]:
    """Adds a problem for each word that is no flag; returns ``UNKNOWN`` for the flags that are probably meant."""
    fields = {spelling: flag.name for flag in all_flags().values() for spelling in (*flag.on, *flag.off)}
    meant, follows_flag = {}, False
    for word in words:
        if word.startswith("-"):
            follows_flag, name = True, word.partition("=")[0]
            close = _closest(name, fields)
            if close is not None:
                meant[fields[close]] = UNKNOWN
            remedy = f"write {close}, or drop it" if close else "drop it; --help lists the flags"
            problems.refuse(True, f"{name} is not a flag. Fix: {remedy}", code="flag-unknown")
        elif not follows_flag:
            problems.refuse(True, f"{word!r} is the value of no flag. Fix: drop it", code="value-without-flag")
    return meant


def _closest(word: str, spellings: Collection[str]) -> str | None:
    """The spelling that a word probably means; None if it is similar to none."""
    bare = {spelling.lstrip("-").replace("_", "-"): spelling for spelling in spellings}
    found = difflib.get_close_matches(word.lstrip("-").replace("_", "-"), bare, n=1, cutoff=_SIMILAR)
    return bare[found[0]] if found else None


class _Switch(argparse.Action):
    """Stores whether the spelling turns the flag on or off."""

    def __init__(self, option_strings, dest, off=(), **kwargs):
        super().__init__(option_strings, dest, nargs=0, **kwargs)
        self.off = off

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, option_string not in self.off)


def add_flag(box: argparse._ArgumentGroup, flag: Flag, dest: str) -> None:
    """Adds a flag to a group of a parser; the parser has no value under ``dest`` if the flag is not given."""
    text = (flag.help + _describe_default(flag)).replace("%", "%%")
    if flag.kind is bool:
        box.add_argument(
            *flag.on, *flag.off, dest=dest, action=_Switch, off=flag.off, help=text, default=argparse.SUPPRESS
        )
        return
    metavar = flag.metavar or (f"{{{','.join(map(str, flag.choices))}}}" if flag.choices else None)
    words: dict[str, Any] = dict(nargs=flag.nargs, metavar=metavar or _METAVARS[flag.kind])
    box.add_argument(*flag.on, dest=dest, help=text, default=argparse.SUPPRESS, **words)


_METAVARS = {int: "N", float: "X", str: "NAME", tuple: "WORD"}


def _describe_default(flag: Flag) -> str:
    if flag.kind is bool:
        return f" (default: {'on' if flag.default else 'off'})"
    return "" if flag.default is None else f" (default: {flag.default})"


def _resolve(given: Mapping[str, Any], problems: Problems, workers: Workers | None = None) -> Config:
    command_line = {name: value for name, value in given.items() if name in all_flags()}
    paths = given.get("config", [])
    file: dict[str, object] = {}
    for each in paths if isinstance(paths, list) else []:
        file = _override(file, _read_file(each, problems))
    path = " and ".join(map(str, paths)) if isinstance(paths, list) else ""
    from_file = file.pop("model", None)
    model = given.get("model", from_file)
    problems.refuse(
        from_file is not None and model != from_file and UNKNOWN not in (model, from_file),
        f"--model {model} contradicts the model {from_file} of {path}. Fix: drop one of them",
        code="flags-exclude-each-other",
    )
    preset = _preset(model, f" of {path}" if "model" not in given else "", problems)
    if ds_config := (file | command_line).get("deepspeed_config"):  # weighs more than a preset
        with contextlib.suppress(ConfigError):  # reported below
            settings = {} if ds_config is UNKNOWN else {one.flag: one.value for one in settings_in(str(ds_config))}
            preset = {name: value for name, value in _override(preset, settings).items() if name not in settings}
    check = (lambda config: check_start(config, workers)) if workers is not None else None
    name = model if isinstance(model, str) and model in PRESETS else None
    return compose(_override(_override(preset, file), command_line), name, problems, check)


def _preset(model: Any, source: str, problems: Problems) -> dict[str, Any]:
    """The values of a preset; all are ``UNKNOWN`` if there is no such preset."""
    if model is None:
        return {}
    if isinstance(model, str) and model in PRESETS:
        return dict(PRESETS[model].values)
    problems.refuse(
        model is not UNKNOWN,
        f"--model {model}{source} is not a preset. Fix: choose one of {', '.join(PRESETS)}",
        code="preset-unknown",
    )
    return dict.fromkeys((flag.name for flag in all_flags().values() if flag.preset), UNKNOWN)


def _override(weaker: Mapping[str, object], stronger: Mapping[str, object]) -> dict:
    displaced = {name for names in _ALTERNATIVES if _says_something(names, stronger) for name in names}
    if str(stronger.get("num_experts", "")).lower() == "none":
        displaced |= {flag.name for flag in flags_of(group_classes()["moe"])}
    return {**{name: value for name, value in weaker.items() if name not in displaced}, **stronger}


def _says_something(names: set[str], values: Mapping[str, object]) -> bool:
    return any(values.get(name) not in (None, False) for name in names)


def read_config_file(path: str | os.PathLike) -> dict[str, object]:
    """Reads values by field name from a YAML file, and ``model`` if the file names one.

    Keys are spelled with dashes or underscores, as fields or as flags, flat or below the name of their group.

    Raises:
        ConfigError: the file cannot be read, or keys are not flags.
    """
    problems = Problems()
    values = _read_file(path, problems)
    problems.raise_found()
    return values


def _read_file(path: str | os.PathLike, problems: Problems) -> dict[str, Any]:
    """As :func:`read_config_file`, with ``UNKNOWN`` for values that problems of the file conceal."""
    try:
        content = _load(path)
    except ConfigError as error:
        problems.found.append(error)
        return dict.fromkeys((*all_flags(), "model"), UNKNOWN)
    result: dict[str, object] = {}
    for key, value in content.items():
        group = group_classes().get(_underscored(key))
        if group is None or not isinstance(value, dict):
            _put(result, key, value, path, problems)
            continue
        members = {flag.name for flag in flags_of(group)}
        for inner, item in value.items():
            name = _put(result, inner, item, path, problems)
            problems.refuse(
                name is not None and name not in members,
                f"{short(inner)} in {path} does not belong below {key}. Fix: move it out of there",
                code="config-key-misplaced",
            )
    return result


def _load(path: str | os.PathLike) -> dict:
    unreadable = "config-file-unreadable"
    try:
        with open(open_named(path, CONFIG), encoding="utf-8") as file:
            content = yaml.load(file, _LOADER) or {}  # noqa: S506  # both loaders make only plain values
    except OSError as error:
        raise ConfigError(
            f"--config {path} cannot be read: {error.strerror}. Fix: correct the path", code=unreadable
        ) from None
    except RecursionError:
        raise ConfigError(
            f"--config {path} is nested too deeply. Fix: write one key and value a line", code=unreadable
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"--config {path} is not YAML: {without_middle(' '.join(str(error).split()))}. Fix: correct it",
            code=unreadable,
        ) from None
    refuse(
        not isinstance(content, dict),
        f"--config {path} does not hold keys and values. Fix: write one key and value a line",
        code=unreadable,
    )
    return content


def _put(result: dict, key: object, value: object, path: str | os.PathLike, problems: Problems) -> str | None:
    """Adds a value to the result; returns its field, or None for a key that is no flag."""
    known, name = _file_keys(), _underscored(key)
    if name not in known:
        close = _closest(name, known)
        if close is not None:
            result[known[close][0]] = UNKNOWN
        remedy = f"write {close}, or drop it" if close else "drop it; --help lists the flags"
        problems.refuse(True, f"{short(key)} in {path} is not a flag. Fix: {remedy}", code="flag-unknown")
        return None
    field, negated = known[name]
    if negated and not isinstance(value, bool):
        problems.refuse(True, f"{key} in {path} is {shown(value)}. Fix: make it true or false", code="value-unreadable")
        value = UNKNOWN
    elif negated:
        value = not value
    problems.refuse(
        result.get(field, UNKNOWN) is not UNKNOWN,
        f"{path} gives {field} twice. Fix: drop one",
        code="config-key-repeated",
    )
    result[field] = value
    return field


def _file_keys() -> dict[str, tuple[str, bool]]:
    """Maps every spelling of a key to its field, and to whether it negates the field."""
    keys = {"model": ("model", False)}
    for flag in all_flags().values():
        keys.update((_underscored(spelling), (flag.name, False)) for spelling in flag.on)
        keys.update((_underscored(spelling), (flag.name, True)) for spelling in flag.off)
    return keys


def _underscored(key: object) -> str:
    return str(key).removeprefix("--").replace("-", "_")
