"""Presets of ``--model`` as options of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.pretraining.config.layer_pattern import from_interval
from megatron.pretraining.presets import PRESETS


def preset_options(name: str, given: Mapping[str, object]) -> dict[str, object]:
    """The options of a preset, by Megatron-LM's names.

    Args:
        name: of the preset.
        given: values of options that override the preset's, by name; None if an option is not given, and ``UNKNOWN``
            if its value is not readable.
    """
    options: dict[str, Any] = dict(PRESETS[name].values)
    layers, length = ({**options, **_numbers(given)}[key] for key in ("num_layers", "seq_length"))
    if (interval := options.pop("expert_interval", None)) is not None:
        options["moe_layer_freq"] = from_interval(interval, layers)
    options["max_position_embeddings"] = length
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}


def _numbers(values: Mapping[str, object]) -> dict[str, int]:
    return {name: value for name, value in values.items() if isinstance(value, int)}
