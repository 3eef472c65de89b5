"""What is assigned: a range of bytes of one operator, and the ranks that hold a copy of it."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Item:
    """The bytes [start, stop) of one kind of state of one operator.

    Attributes:
        operator: its name.
        slot: what of it: ``weights`` (the compute copy), ``optimizer`` or, of that, ``master`` alone; ``gradients``.
        slice: which of its tensor-parallel slices; None for what every tensor-parallel rank holds alike.
        start: first byte.
        stop: the byte after the last.
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
        """Whether it belongs to an expert that a router chooses."""
        return ".expert." in self.operator


_ALIGNMENT = 4096  # bytes: pages stay whole, and so does every element
_PIECES_PER_SHARE = 64  # small enough to level what whole layers leave uneven, large enough to write


def cut_large(items: Sequence[Item]) -> list[Item]:
    """Cuts items that are larger than an even share, so that no rank has to save more because of one of them.

    Only what is not an expert and has several holders is cut; an even share is the bytes of all such items with
    the same holders, divided by the number of these.  Layers are smaller than that in most models, so it is the
    embedding that is cut: whole, it would be the bottleneck.  In pieces it fills the gaps between whole layers.
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
