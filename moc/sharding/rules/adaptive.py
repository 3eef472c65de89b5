"""Adaptive sharding."""

from __future__ import annotations

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
    for index in sorted(range(len(items)), key=lambda i: -items[i].nbytes):
        item = items[index]
        rank = min(item.holders, key=lambda r: (total.get(r, 0), r))
        total[rank] = total.get(rank, 0) + item.nbytes
        saver[index] = rank
    return saver
