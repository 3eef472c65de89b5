"""Equal sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moc.sharding.item import Item
from moc.sharding.rules.adaptive import largest_to_least_loaded
from moc.sharding.rules.registry import rule


@rule("equal")
def equal(items: Sequence[Item], load: Mapping[int, int]) -> list[int]:
    """Every holder saves about as many bytes of these items, whatever else it has to save.

    For experts over expert-parallel groups this is MoC's section 4.1, for layers over data-parallel ranks its
    section 4.2.  The paper does not say how it deals layers of unequal size; here the largest goes first.
    """
    return largest_to_least_loaded(items, {})
