"""Boxes of unpartitioned tensors: the coordinate system shared by all layouts.

Tensor, expert and pipeline parallelism cut a parameter into boxes; ZeRO cuts the flattened box at any element. Both
become :class:`Region`, so that saving and loading never handle a flat buffer or a shard boundary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Region:
    """An axis-aligned box of ``shape`` elements starting at ``offset``, in elements of each axis."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.shape)

    def slices(self, origin: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """Returns the index of this box in a tensor whose first element is at ``origin`` (default: zero)."""
        origin = origin or (0,) * len(self.offset)
        return tuple(slice(o - p, o - p + n) for o, p, n in zip(self.offset, origin, self.shape, strict=True))

    def intersect(self, other: Region) -> Region | None:
        """Returns the intersection, or None if it is empty."""
        start = tuple(map(max, self.offset, other.offset))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Region(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def without(self, part: Region) -> Iterator[Region]:
        """Yields disjoint boxes that cover this one except ``part``."""
        offset, shape = self.offset, self.shape
        for axis, (start, count) in enumerate(zip(part.offset, part.shape, strict=True)):
            stop, end = start + count, offset[axis] + shape[axis]
            for one, other in ((offset[axis], start), (stop, end)):
                if one < other:
                    yield Region(_with(offset, axis, one), _with(shape, axis, other - one))
            offset, shape = _with(offset, axis, start), _with(shape, axis, count)

    def cut(self, most: int) -> Iterator[Region]:
        """Yields boxes of at most ``most`` elements (at least one) that cover this one in element order."""
        if self.numel <= most:
            yield self
            return
        axis = next(axis for axis, count in enumerate(self.shape) if count > 1)
        start, count = self.offset[axis], self.shape[axis]
        step = max(1, most * count // self.numel)
        for first in range(0, count, step):
            shape = _with(self.shape, axis, min(step, count - first))
            yield from Region(_with(self.offset, axis, start + first), shape).cut(most)

    def shifted(self, by: tuple[int, ...]) -> Region:
        """Returns this box translated by ``by``."""
        return Region(tuple(map(sum, zip(self.offset, by, strict=True))), self.shape)


def _with(numbers: tuple[int, ...], axis: int, number: int) -> tuple[int, ...]:
    return (*numbers[:axis], number, *numbers[axis + 1 :])


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Region]]:
    """Cuts the range [start, stop) of a row-major flattened tensor into boxes of that tensor.

    Each box is contiguous in the flattened tensor.  There are at most ``2 * len(shape) - 1`` of them.

    Yields:
        (index of the box's first element in the flattened tensor, box), ascending.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield start, Region((start,) * len(shape), (stop - start,) * len(shape))
        return
    row = math.prod(shape[1:])
    first_whole, last_whole = -(-start // row), stop // row
    if first_whole > last_whole:  # within one row
        yield from _in_row(shape, start // row, start, stop)
        return
    yield from _in_row(shape, first_whole - 1, start, first_whole * row)  # nothing, if the range begins with a row
    if first_whole < last_whole:
        zeros = (0,) * (len(shape) - 1)
        yield first_whole * row, Region((first_whole, *zeros), (last_whole - first_whole, *shape[1:]))
    yield from _in_row(shape, last_whole, last_whole * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[tuple[int, Region]]:
    base = index * math.prod(shape[1:])
    for position, box in boxes_of_range(shape[1:], start - base, stop - base):
        yield base + position, Region((index, *box.offset), (1, *box.shape))
