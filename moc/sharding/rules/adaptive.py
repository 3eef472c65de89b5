"""Adaptive sharding."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from moc.sharding.item import Item
from moc.sharding.rules.registry import rule


@rule("adaptive")
def adaptive(items: Sequence[Item], load: Mapping[int, int]) -> list[int]:
    """The largest item goes to the holder with the least to save so far, expert parts included.

    MoC, section 4.3: so what is not an expert fills the gaps that partial experts checkpointing leaves.
    """
    return largest_to_least_loaded(items, load)


def largest_to_least_loaded(items: Sequence[Item], load: Mapping[int, int]) -> list[int]:
    """Greedy: items in descending size, each to the least loaded of its holders.

    Items of one size keep their order, and among equally loaded holders the lowest rank is taken.  Without loads
    to start from, and where all items have the same m holders, the bottleneck is at most 4/3 - 1/(3m) times that
    of the best assignment (Graham, 1969).

    Args:
        items: what to assign.
        load: bytes that each rank has to save already; none where it is missing.
    """
    total = dict(load)
    saver = [0] * len(items)
    heaps: dict[int, list[tuple[int, int]]] = {}  # by identity of the holders: hashing a thousand ranks takes long
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
    """The rank with the least load, the lowest of several; brings that part of the heap up to date.

    Loads only grow.  So what the heap has of a rank is at most its load, and where the top is up to date, no rank has
    less.
    """
    while True:
        seen, rank = heap[0]
        if seen == total.get(rank, 0):
            return rank
        heapq.heapreplace(heap, (total[rank], rank))
