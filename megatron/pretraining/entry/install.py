"""Puts our entry point into ``megatron.training``."""

from __future__ import annotations

import argparse
import functools
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
    checkpointing: Any = import_module("megatron.training.checkpointing")
    private_interfaces.require("megatron.training")
    flags = import_module("megatron.pretraining.entry.flags")
    own_pretrain = import_module("megatron.pretraining.entry.pretrain").pretrain
    if package.pretrain is own_pretrain:
        return
    arguments.parse_args = flags.parse_args(arguments.parse_args)
    arguments.validate_args = flags.validate_args(arguments.validate_args)
    checkpointing.load_args_from_checkpoint = flags.load_args_from_checkpoint(checkpointing.load_args_from_checkpoint)
    arguments.set_global_variables = flags.set_global_variables(arguments.set_global_variables)
    arguments._print_args = flags.print_args
    utils: Any = import_module("megatron.training.argument_utils")
    model = flags.transformer_config(utils.core_transformer_config_from_args)
    utils.core_transformer_config_from_args = arguments.core_transformer_config_from_args = model
    factory: Any = utils.ArgumentGroupFactory
    field_docstrings = functools.partial(factory._get_field_docstrings, factory)
    factory._get_field_docstrings = staticmethod(
        functools.cache(field_docstrings)
    )  # it parses the source of each class
    package.pretrain = training.pretrain = own_pretrain


def describe_options() -> None:
    """Reads the descriptions of Megatron-LM's options (90 % of its parser's time) once, before workers are forked."""
    arguments: Any = import_module("megatron.training.arguments")
    arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
