"""Our options in Megatron-LM's parser; a launcher reads them without importing torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from megatron.pretraining.config.flag import Flag, flags_of
from megatron.pretraining.config.groups import group_classes
from megatron.pretraining.presets import PRESETS

OWN_GROUPS = ("snapshot", "faults", "elastic", "zero")
"""Groups that consist only of our flags."""
PREFIX = "moc_"
"""Prefix of our values in the parsed namespace, which also holds the values of Megatron-LM's scripts."""
OWN_PROGRAM = "moc_own_program"
"""Name of the argument that is true if this project's program is running, and not a user's script."""
DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer", "eval_interval": 1000, OWN_PROGRAM: True}
"""Defaults of this project's program for Megatron-LM's options that have no default."""
GENERAL: dict[str, dict[str, Any]] = {
    "config": {
        "action": "append",
        "metavar": "FILE.yaml",
        "help": "Start from the options in this file, by name; of several files, a later one overrides an earlier one.",
    },
    "model": {
        "choices": (*PRESETS,),
        "metavar": "NAME",
        "help": "Start from the options of this model; files and the command line override them.",
    },
    "print-config": {
        "action": "store_true",
        "help": "Print the options that differ from Megatron-LM's defaults, as a file for --config; exit.",
    },
    "dialect": {
        "metavar": "NAME",
        "help": "The program whose options the command line has: megatron-lm (older releases), megatron-deepspeed, "
        "mindspeed, pai, flagscale, or moc (our previous release). By default, options that only one of them has "
        "select it.",
    },
    "help-all": {"action": "store_true", "help": "Print Megatron-LM's options as well; exit."},
}
"""Options that are not flags of a run, as arguments of ``add_argument`` by name."""


def own_flags() -> list[Flag]:
    """Returns our flags, in the order of ``--help``."""
    return [flag for group in OWN_GROUPS for flag in flags_of(group_classes()[group])] + _other_flags()


def _other_flags() -> list[Flag]:
    """Returns our flags in groups with arguments of Megatron-LM."""
    return [flag for group, kind in group_classes().items() if group not in OWN_GROUPS for flag in flags_of(kind)]


def own_sections() -> Iterator[tuple[str, str, list[argparse.Action]]]:
    """Yields title, description and options of each section of the page of flags."""
    parser: Any = add_own_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    by_name = {action.dest.removeprefix(PREFIX): action for action in parser._actions}
    yield "Start", "", [by_name[name.replace("-", "_")] for name in GENERAL]
    for group in OWN_GROUPS:
        kind = group_classes()[group]
        title, _, description = (kind.__doc__ or "").partition(": ")
        actions = [by_name[flag.name] for flag in flags_of(kind) if flag.name in by_name]
        yield title.rstrip("."), description[:1].upper() + description[1:], actions
    yield "Other", "", [by_name[flag.name] for flag in _other_flags()]


def own_parser(program: str) -> argparse.ArgumentParser:
    """Returns a parser of this project's options, whose help mentions Megatron-LM's options."""
    parser = argparse.ArgumentParser(program, f"{program} [options of Megatron-LM] [options below]", allow_abbrev=False)
    return add_own_flags(parser)


def add_own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds our options as another group; returns the parser, like Megatron-LM's providers of arguments."""
    group = parser.add_argument_group("fault tolerance", "Snapshots, recovery, faults, and DeepSpeed's optimizer.")
    for name, arguments in GENERAL.items():
        if f"--{name}" not in parser._option_string_actions:  # a script's own option of this name has priority
            group.add_argument(f"--{name}", dest=PREFIX + name.replace("-", "_"), **arguments)
    for flag in own_flags():
        _add_flag(group, flag, PREFIX + flag.name)
    return parser


class Switch(argparse.Action):
    """Stores whether the spelling turns the flag on or off."""

    def __init__(self, option_strings, dest, off=(), **kwargs):
        super().__init__(option_strings, dest, nargs=0, **kwargs)
        self.off = off

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, option_string not in self.off)


def _add_flag(group: argparse._ArgumentGroup, flag: Flag, dest: str) -> None:
    """Adds a flag to a group of a parser; the parser has no value under ``dest`` if the flag is not given."""
    text = (flag.help + _describe_default(flag)).replace("%", "%%")
    if flag.kind is bool:
        group.add_argument(
            *flag.on, *flag.off, dest=dest, action=Switch, off=flag.off, help=text, default=argparse.SUPPRESS
        )
        return
    metavar = flag.metavar or (f"{{{','.join(map(str, flag.choices))}}}" if flag.choices else None)
    arguments: dict[str, Any] = dict(nargs=flag.nargs, metavar=metavar or _METAVARS[flag.kind])
    group.add_argument(*flag.on, dest=dest, help=text, default=argparse.SUPPRESS, **arguments)


_METAVARS = {int: "N", float: "X", str: "NAME", tuple: "WORD"}


def _describe_default(flag: Flag) -> str:
    if flag.kind is bool:
        return f" (default: {'on' if flag.default else 'off'})"
    return "" if flag.default is None else f" (default: {flag.default})"
