"""Our flags in Megatron-LM's parser."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

from megatron.pretraining.arguments import add_flag
from megatron.pretraining.entry.configuration import own_flags

_PREFIX = "moc_"
"""Of our values in the parsed namespace, where Megatron-LM's scripts look for theirs."""


def add_own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds our flags as one more group; returns the parser, as Megatron-LM's providers of arguments do."""
    box = parser.add_argument_group("fault tolerance", "Snapshots, recovery and injected faults.")
    for flag in own_flags():
        add_flag(box, flag, _PREFIX + flag.name)
    return parser


def take_own_values(arguments: argparse.Namespace) -> dict[str, object]:
    """Removes our values from parsed arguments; returns the given ones, by name of the flag."""
    names = [flag.name for flag in own_flags() if hasattr(arguments, _PREFIX + flag.name)]
    found = {name: getattr(arguments, _PREFIX + name) for name in names}
    for name in names:
        delattr(arguments, _PREFIX + name)
    return found


_own: dict[str, object] = {}


def parse_args(real: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    """Megatron-LM's ``parse_args``, which understands our flags as well."""

    @functools.wraps(real)
    def parse(extra_args_provider=None, ignore_unknown_args=False):
        def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            return add_own_flags(parser if extra_args_provider is None else extra_args_provider(parser))

        arguments = real(provider, ignore_unknown_args)
        _own.clear()
        _own.update(take_own_values(arguments))
        return arguments

    return parse


def own_values() -> dict[str, object]:
    """The values of our flags on the command line that was parsed last."""
    return dict(_own)
