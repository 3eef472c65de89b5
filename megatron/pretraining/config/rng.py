"""Random numbers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pretraining.config.flag import FlagGroup, flag


@dataclass(frozen=True)
class RngFlags(FlagGroup):
    """Random numbers and initialization."""

    seed: int = flag(1234, "Everything random follows from this number and the position.", at_least=1)
    init_method_std: float = flag(0.02, "Spread of the initial weights.", above=0)
