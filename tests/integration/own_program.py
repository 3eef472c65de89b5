"""The repository's program in a worker of a test's world (:mod:`tests.worlds`)."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from megatron.pretraining.config.groups import group_classes
from megatron.pretraining.entry import gpt
from megatron.pretraining.entry.configuration import MegatronConfig
from megatron.pretraining.entry.pretrain import prepared
from megatron.pretraining.entry.program import StockProgram


def program_of(flags: Mapping[str, Any]) -> tuple[MegatronConfig, StockProgram]:
    """Configuration and program of these flags, by name, for ``loop.pretrain``; once in a process."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(flags), file)
        file.flush()
        return program_of_words(["--config", file.name])


def program_of_words(words: Sequence[str]) -> tuple[MegatronConfig, StockProgram]:
    """As :func:`program_of`, of a command line."""
    sys.argv = ["pretrain_gpt_moe.py", *words]
    return prepared(gpt.program_of(gpt.configured()))


def changed(config: MegatronConfig, flags: Mapping[str, Any]) -> MegatronConfig:
    """The configuration with other values of flags, by name."""
    for group, kind in group_classes().items():
        names = {field.name for field in dataclasses.fields(kind)}
        if values := {name: value for name, value in flags.items() if name in names}:
            config = config.replace(group, **values)
    return config
