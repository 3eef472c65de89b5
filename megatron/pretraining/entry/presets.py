"""Presets of ``--model`` as options of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.pretraining.config.layer_pattern import from_interval
from megatron.pretraining.presets import PRESETS


def preset_options(name: str, given: Mapping[str, object]) -> dict[str, object]:
    """The options of a preset, by Megatron-LM's names.

    Args:
        name: of the preset.
        given: values of options that override the preset's, by name; None if an option is not given.
    """
    options = dict(PRESETS[name].values)
    interval = options.pop("expert_interval", None)
    if isinstance(interval, int):
        layers = given.get("num_layers") or options["num_layers"]
        options["moe_layer_freq"] = from_interval(interval, int(str(layers)))
    options["max_position_embeddings"] = given.get("seq_length") or options["seq_length"]
    return {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
