"""Implements equal sharding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moc.sharding.rules.adaptive import largest_to_least_loaded
from moc.sharding.rules.registry import rule
from moc.sharding.save_items import SaveItem


@rule("equal")
def equal(items: Sequence[SaveItem], load: Mapping[int, int]) -> list[int]:
    """Assigns about equally many bytes of these items to each holder, regardless of its other load.

    For experts over expert-parallel groups this is MoC's section 4.1, for layers over data-parallel ranks its section
    4.2.  The paper does not specify the order for layers of unequal size; here the largest goes first.
    """
    return largest_to_least_loaded(items, {})
