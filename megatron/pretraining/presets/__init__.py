"""Models by name, for ``--model``: the papers' models, and tiny ones to experiment with.

A file ``NAME.yaml`` of this package is a model.  It holds options of Megatron-LM by name, its comment states the source
and what is chosen here, and the key ``counted`` describes how parameters are counted (the fields of :class:`Preset`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.pretraining.words import load_config


@dataclass(frozen=True)
class Preset:
    """A model.

    Attributes:
        values: options of Megatron-LM by name; an option that is given overrides its value.
        vocab_size: vocabulary that the parameters are counted with; training takes the tokenizer's.
        total_parameters: according to the source.
        active_parameters: parameters that one token passes through, according to the source.
    """

    values: Mapping[str, Any]
    vocab_size: int
    total_parameters: float | None = None
    active_parameters: float | None = None


def _read(path: Path) -> Preset:
    values = load_config(path)
    return Preset(**values.pop("counted"), values=values)


PRESETS: dict[str, Preset] = {path.stem: _read(path) for path in sorted(Path(__file__).parent.glob("*.yaml"))}
