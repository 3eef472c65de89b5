"""Implements adaptive and equal sharding: the largest item goes to the least loaded holder."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from moc.sharding.rules.registry import rule
from moc.sharding.save_items import SaveItem


@rule("adaptive")
def adaptive(items: Sequence[SaveItem], load: Mapping[int, int]) -> list[int]:
    """Assigns each item, largest first, to its least loaded holder, counting expert parts.

    MoC, section 4.3: dense items fill the gaps that partial experts checkpointing leaves.
    """
    return largest_to_least_loaded(items, load)


def largest_to_least_loaded(items: Sequence[SaveItem], load: Mapping[int, int]) -> list[int]:
    """Assigns items greedily in descending size, each to the least loaded of its holders.

    Items of equal size keep their order, and ties between holders go to the lowest rank.  Without initial loads, and if
    all items have the same m holders, the bottleneck is at most 4/3 - 1/(3m) times the optimum (Graham, 1969).
    """
    total = dict(load)
    saver = [0] * len(items)
    heaps: dict[int, list[tuple[int, int]]] = {}  # by identity of the holders: hashing a thousand ranks is slow
    for index in sorted(range(len(items)), key=lambda i: -items[i].nbytes):
        item = items[index]
        heap = heaps.get(id(item.holders))
        if heap is None:
            heap = heaps[id(item.holders)] = sorted((total.get(rank, 0), rank) for rank in item.holders)
        rank = _least_loaded(heap, total)
        total[rank] = total.get(rank, 0) + item.nbytes
        saver[index] = rank
    return saver


def _least_loaded(heap: list[tuple[int, int]], total: Mapping[int, int]) -> int:
    """Returns the least loaded rank, ties to the lowest; refreshes stale heap entries.

    Loads only grow, so a heap entry is a lower bound of its rank's load; once the top is up to date, no rank has less.
    """
    while True:
        seen, rank = heap[0]
        if seen == total.get(rank, 0):
            return rank
        heapq.heapreplace(heap, (total[rank], rank))


@rule("equal")
def equal(items: Sequence[SaveItem], load: Mapping[int, int]) -> list[int]:
    """Assigns about equally many bytes of these items to each holder, regardless of its other load.

    For experts over expert-parallel groups this is MoC's section 4.1, for layers over data-parallel ranks its section
    4.2.  The paper does not specify the order for layers of unequal size; here the largest goes first.
    """
    return largest_to_least_loaded(items, {})
