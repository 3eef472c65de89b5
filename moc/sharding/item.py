"""Defines save items: a byte range of one operator, and the ranks that hold a copy of it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes [start, stop) of one slot of one operator.

    Attributes:
        operator: name of the operator.
        slot: ``weights`` (the compute copy), ``optimizer``, only its part ``master``, ``gradients``, or ``modules``
            (state of modules that no optimizer updates).
        slice: index of the tensor-parallel slice; None if every tensor-parallel rank holds the same.
        start: first byte.
        stop: one past the last byte.
        holders: the ranks that hold a copy, in ascending order; exactly one of them saves it.
    """

    operator: str
    slot: str
    slice: int | None
    start: int
    stop: int
    holders: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.stop - self.start

    @property
    def is_expert(self) -> bool:
        """Whether the item belongs to a routed expert."""
        return ".expert." in self.operator


_ALIGNMENT = 4096  # bytes; pages and elements are not split
_PIECES_PER_SHARE = 64  # small enough to balance layers, large enough to write efficiently


def cut_large(items: Sequence[Item]) -> list[Item]:
    """Cuts items larger than an even share, which would otherwise be the bottleneck of a rank.

    Only dense items with several holders are cut.  An even share is the bytes of all such items with the same holders,
    divided by the number of holders.  In most models, layers are smaller than a share, so only the embedding is cut.
    Uncut, it would be the bottleneck; its pieces fill the gaps between layers.
    """
    of_holders: dict[tuple[int, ...], int] = defaultdict(int)
    for item in items:
        of_holders[item.holders] += 0 if item.is_expert else item.nbytes
    result = []
    for item in items:
        share = of_holders[item.holders] // len(item.holders)
        whole = item.is_expert or len(item.holders) == 1 or item.nbytes <= share
        result.extend([item] if whole else _cut(item, share // _PIECES_PER_SHARE))
    return result


def _cut(item: Item, largest: int) -> Iterator[Item]:
    pieces = -(-item.nbytes // max(largest, _ALIGNMENT))
    size = -(-item.nbytes // pieces // _ALIGNMENT) * _ALIGNMENT
    for start in range(item.start, item.stop, size):
        yield dataclasses.replace(item, start=start, stop=min(start + size, item.stop))
