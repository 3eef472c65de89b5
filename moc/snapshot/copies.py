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
    """Returns the bytes of all copies."""
    return sum(copy.source.nbytes for copy in copies)


def coalesced(
    sources: Iterable[torch.Tensor], spans: Iterable[tuple[int, int]]
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Joins data that is adjacent in live memory and in the file, such as the boxes of a ZeRO range.

    Args:
        sources: flat tensors.
        spans: bytes [start, stop) of the file for each source.

    Yields:
        Sources, and their spans.
    """
    first, begin, end, behind = None, 0, 0, 0  # behind: address after the run at [begin, end) of the file
    for source, (start, stop) in zip(sources, spans, strict=True):
        if start == stop:
            continue
        address = source.data_ptr()
        if first is not None:
            if address == behind and start == end and _alike(first, source):
                end, behind = stop, address + stop - start
                continue
            yield _extended(first, end - begin), begin, end
        first, begin, end, behind = source, start, stop, address + stop - start
    if first is not None:
        yield _extended(first, end - begin), begin, end


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether one view of a storage can cover both."""
    return one.dtype == other.dtype and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


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
