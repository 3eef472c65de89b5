"""Puts our entry point into ``megatron.training``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from moc import private_interfaces


def install() -> None:
    """Replaces ``megatron.training.pretrain``, and adds our flags to its parser; further calls change nothing.

    Raises:
        UnknownReleaseError: ``megatron.training`` lacks a private interface that is used here.
    """
    package: Any = import_module("megatron.training")
    arguments: Any = import_module("megatron.training.arguments")
    training: Any = import_module("megatron.training.training")
    private_interfaces.require("megatron.training")
    flags = import_module("megatron.pretraining.entry.flags")
    ours = import_module("megatron.pretraining.entry.pretrain").pretrain
    if package.pretrain is ours:
        return
    arguments.parse_args = flags.parse_args(arguments.parse_args)
    arguments.validate_args = flags.validate_args(arguments.validate_args)
    arguments.set_global_variables = flags.set_global_variables(arguments.set_global_variables)
    arguments._print_args = flags.print_args
    package.pretrain = training.pretrain = ours
