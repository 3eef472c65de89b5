"""Implements Megatron-DeepSpeed's sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moc.sharding.rules.registry import rule
from moc.sharding.save_items import SaveItem


@rule("baseline")
def baseline(items: Sequence[SaveItem], load: Mapping[int, int]) -> list[int]:
    """Assigns items to their first holder: rank 0 the dense operators, the first expert-parallel group the experts.

    MoC, section 4, Figure 7(a).
    """
    return [item.holders[0] for item in items]
