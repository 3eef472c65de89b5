"""Configurations of ``pretrain_gpt_moe.py``, without workers."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import yaml

from megatron.pretraining.entry.offline import config_of_words


def config_of(flags: Mapping[str, Any], workers: int | None = None) -> Any:
    """The configuration of flags by name; for the fewest workers that the layout allows, by default."""
    plain = {name: [*value] if isinstance(value, tuple) else value for name, value in flags.items()}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(plain, file)
        file.flush()
        return config_of_words(["--config", file.name], workers)
