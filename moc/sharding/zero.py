"""ZeRO's partition of a flat buffer, which knows nothing of parameters: ranges of operators for each part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def flat_ranges(sizes: Sequence[int], parts: int) -> Iterator[tuple[int, int, int, int]]:
    """Cuts segments that lie behind each other in a buffer into equal contiguous parts of the buffer.

    DeepSpeed's ZeRO-1 and ZeRO-2 and megatron-core's distributed optimizer all give each data-parallel rank one
    such part of the optimizer state.

    Args:
        sizes: elements of each segment.
        parts: how many ranks share the buffer; its end is padded to a multiple of that.

    Yields:
        (segment, part, first element in the segment, the one after the last), in ascending order, none empty.
    """
    each = -(-sum(sizes) // parts)
    begin = 0
    for segment, size in enumerate(sizes):
        start = 0
        while start < size:
            part = (begin + start) // each
            stop = min(size, (part + 1) * each - begin)
            yield segment, part, start, stop
            start = stop
        begin += size
