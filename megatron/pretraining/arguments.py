"""The command line: flags, presets and YAML files become a ``Config``.  No argparse namespace leaves this module."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import yaml

from megatron.pretraining.config.composed import Config, all_flags, compose, group_classes
from megatron.pretraining.config.ds_config import settings_in
from megatron.pretraining.config.flag import ConfigError, Flag, flags_of, refuse
from megatron.pretraining.presets import PRESETS
from megatron.pretraining.process.rank0 import is_first_worker, let_first_worker_speak
from moc.output import Parser, print_lines

# Alternative flags: one given by a stronger source displaces all of its set in the weaker ones.
_ALTERNATIVES = (
    {"moe_layer_freq", "expert_interval"},
    {"train_iters", "train_samples"},
    {"num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"},
    {"data_path", "mock_data"},
    {"bf16", "fp16"},
)


def parse_config(argv: Sequence[str] | None = None) -> Config:
    """Reads the flags; ``argv`` defaults to that of the process.

    The ``--model`` preset overrides defaults, ``--config`` files the preset, and the command line the files.  Exits
    with code 2 and one sentence if the flags are invalid, and with 0 after ``--help`` and ``--print-config``.
    """
    parser = build_parser()
    known, unknown = parser.parse_known_args(argv)
    given = vars(known)
    try:
        _refuse_unknown(unknown)
        config = _resolve(given)
    except ConfigError as error:
        parser.error(str(error))
    if given.get("print_config"):
        if is_first_worker():
            print_lines(*config.to_yaml().removesuffix("\n").split("\n"))
        parser.exit(0)
    return config


def valid_config(argv: Sequence[str]) -> Config | None:
    """Reads the flags without printing anything; None if they are invalid, which the workers report."""
    parser: Any = build_parser()
    parser.error = _raise
    try:
        known, unknown = parser.parse_known_args([word for word in argv if word not in ("-h", "--help")])
        return None if unknown else _resolve(vars(known))
    except ConfigError:
        return None


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags; its result omits flags that are not given."""
    parser = _Parser(
        usage="%(prog)s [--model NAME] [--config FILE.yaml] [flags]",
        description="Pre-trains a Mixture-of-Experts GPT.",
        epilog='A number without a default is undone by the word "none", as in --num-experts none.',
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--model", choices=sorted(PRESETS), metavar="NAME", help=f"Start from this model: {', '.join(PRESETS)}."
    )
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


def _raise(message: str) -> NoReturn:
    raise ConfigError(message)


class _Parser(Parser):
    """Reports an error by rank 0 alone: under a launcher all workers find the same one."""

    def error(self, message):
        let_first_worker_speak()
        super().error(message)


def _refuse_unknown(words: Sequence[str]) -> None:
    if not words:
        return
    word = next((word for word in words if word.startswith("-")), words[0]).partition("=")[0]
    spellings = [spelling for flag in all_flags().values() for spelling in (*flag.on, *flag.off)]
    close = difflib.get_close_matches(word, spellings, n=1)
    raise ConfigError(f"{word} is not a flag: {f'did you mean {close[0]}?' if close else 'see --help.'}")


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


def _resolve(given: dict) -> Config:
    command_line = {name: value for name, value in given.items() if name in all_flags()}
    paths = given.get("config", [])
    file: dict[str, object] = {}
    for each in paths:
        file = _override(file, read_config_file(each))
    path = " and ".join(paths)
    from_file = file.pop("model", None)
    model = given.get("model", from_file)
    refuse(
        from_file is not None and model != from_file,
        f"--model {model} contradicts the model {from_file} of {path}: drop one of them.",
    )
    refuse(
        model is not None and (not isinstance(model, str) or model not in PRESETS),
        f"model {model!r} of {path} is not one of {', '.join(PRESETS)}: choose one.",
    )
    preset = dict(PRESETS[model].values) if model else {}
    if ds_config := (file | command_line).get("deepspeed_config"):  # weighs more than a preset
        settings = {one.flag: one.value for one in settings_in(str(ds_config))}
        preset = {name: value for name, value in _override(preset, settings).items() if name not in settings}
    return compose(_override(_override(preset, file), command_line), model)


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
        ConfigError: the file cannot be read, or a key is not a flag.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read ({error.strerror}): correct the path.") from None
    except RecursionError:
        raise ConfigError(f"--config {path} is nested too deeply: write key: value.") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"--config {path} is not YAML ({' '.join(str(error).split())}): correct it.") from None
    refuse(not isinstance(content or {}, dict), f"--config {path} does not hold keys and values: write key: value.")
    result: dict[str, object] = {}
    for key, value in (content or {}).items():
        group = group_classes().get(_underscored(key))
        if group is None or not isinstance(value, dict):
            _put(result, key, value, path)
            continue
        members = {flag.name for flag in flags_of(group)}
        for inner, item in value.items():
            name = _put(result, inner, item, path)
            refuse(name not in members, f"{inner} in {path} does not belong below {key}: move it out of there.")
    return result


def _put(result: dict, key: object, value: object, path: str | os.PathLike) -> str:
    known, name = _file_keys(), _underscored(key)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "see --help for what there is."
        raise ConfigError(f"{key} in {path} is not a flag: {hint}")
    field, negated = known[name]
    if negated:
        refuse(not isinstance(value, bool), f"{key} in {path} takes true or false; change {value!r}.")
        value = not value
    refuse(field in result, f"{path} gives {field} twice: drop one.")
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
