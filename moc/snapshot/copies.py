"""Copies, coalesced into as few pieces as memory allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Copy:
    """One contiguous piece: flat tensors of equal length and dtype, from live memory to host memory."""

    source: torch.Tensor
    target: torch.Tensor


def nbytes(copies: Iterable[Copy]) -> int:
    """Bytes of all copies."""
    return sum(copy.source.nbytes for copy in copies)


def coalesced(
    sources: Iterable[torch.Tensor], spans: Iterable[tuple[int, int]]
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Joins what is adjacent in live memory and in the file, such as the boxes of a ZeRO range.

    Args:
        sources: flat tensors.
        spans: bytes [start, stop) of the file that each goes to.

    Yields:
        Sources, and their spans.
    """
    first, run = None, (0, 0, 0, 0)  # storage, position after the last byte, first byte and end in the file
    for source, (start, stop) in zip(sources, spans, strict=True):
        if start == stop:
            continue
        storage, position = source.untyped_storage().data_ptr(), source.data_ptr()
        if first is not None and run[0] == storage and run[1] == position and run[3] == start:
            if first.dtype == source.dtype:
                run = storage, position + stop - start, run[2], stop
                continue
        if first is not None:
            yield _extended(first, run[3] - run[2]), run[2], run[3]
        first, run = source, (storage, position + stop - start, start, stop)
    if first is not None:
        yield _extended(first, run[3] - run[2]), run[2], run[3]


def _extended(first: torch.Tensor, nbytes: int) -> torch.Tensor:
    return first if first.nbytes == nbytes else first.as_strided((nbytes // first.itemsize,), (1,))


def pieces(copies: Iterable[Copy], most: int) -> Iterator[list[Copy]]:
    """Cuts copies, in order, into pieces of at most ``most`` bytes, at least the size of an element."""
    piece, room = [], most
    for copy in copies:
        start, stop, width = 0, copy.source.numel(), copy.source.itemsize
        while start < stop:
            end = min(stop, start + room // width)
            if end > start:
                whole = end - start == stop
                piece.append(copy if whole else Copy(copy.source[start:end], copy.target[start:end]))
                start, room = end, room - (end - start) * width
            if start < stop:
                yield piece
                piece, room = [], most
    if piece:
        yield piece
