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


def coalesced(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Joins copies that are adjacent in both memories, such as the boxes of a ZeRO range."""
    pending = None
    for copy in copies:
        if not copy.source.numel():
            continue
        joined = _joined(pending, copy) if pending else None
        if pending and not joined:
            yield pending
        pending = joined or copy
    if pending:
        yield pending


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


def _joined(one: Copy, other: Copy) -> Copy | None:
    source, target = _longer(one.source, other.source), _longer(one.target, other.target)
    return Copy(source, target) if source is not None and target is not None else None


def _longer(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """Returns one tensor over two, if the second starts in the same storage where the first ends."""
    follows = (
        one.dtype == other.dtype
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and one.storage_offset() + one.numel() == other.storage_offset()
    )
    return one.as_strided((one.numel() + other.numel(),), (1,)) if follows else None
