"""Presets of ``--model`` as options of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from megatron.pretraining.presets import PRESETS

_MOST_LAYERS = 10_000


def preset_options(name: str, given: Mapping[str, object]) -> dict[str, object]:
    """Returns the options of a preset, by Megatron-LM's names.

    The pattern of layers with experts is cut or repeated if another number of layers is given.

    Args:
        name: name of the preset.
        given: values of options that override the preset's values, by name; None if an option is not given, and
            ``UNKNOWN`` if its value is not readable.
    """
    options: dict[str, Any] = dict(PRESETS[name].values)
    layers, length = ({**options, **_numbers(given)}[key] for key in ("num_layers", "seq_length"))
    if (pattern := options.get("moe_layer_freq")) is not None:
        options["moe_layer_freq"] = list(islice(cycle(pattern), max(0, min(layers, _MOST_LAYERS))))
    return options | {"max_position_embeddings": length}


def _numbers(values: Mapping[str, object]) -> dict[str, int]:
    return {name: value for name, value in values.items() if isinstance(value, int)}
