"""Assigns the experts of a node to its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from moc.elastic.placement import EMPTY


def split(table: numpy.ndarray, loads: Sequence[int], ranks: int, before: numpy.ndarray | None = None) -> numpy.ndarray:
    """Distributes the experts of each node among its ranks.

    Experts are dealt by tokens per replica, highest first, each to the least loaded rank with a free slot. Then each
    part is given to the rank that already holds most of it.

    Args:
        table: experts by node, int64[nodes, slots of a node], each at most once; negative for empty slots.
        loads: tokens of each expert.
        ranks: ranks of a node, with equally many slots.
        before: previous experts by node, rank by rank, [nodes, previous slots of a node]; none by default.

    Returns:
        Experts by rank, ascending, int64[nodes * ranks, slots]; empty slots are last.
    """
    nodes, slots = len(table), table.shape[1] // ranks
    if ranks == 1:
        return _ascending(table, len(loads))
    holders = numpy.bincount(table[table != EMPTY], minlength=len(loads))
    weights = numpy.append(numpy.asarray(loads) / numpy.maximum(holders, 1), -1.0)
    hottest_first = numpy.take_along_axis(table, numpy.argsort(-weights[table], axis=1, kind="stable"), axis=1)
    parts = numpy.full((nodes, ranks, slots), EMPTY, numpy.int64)
    work, used, every = numpy.zeros((nodes, ranks)), numpy.zeros((nodes, ranks), numpy.int64), numpy.arange(nodes)
    for expert in hottest_first.T:
        rank = numpy.where(used < slots, work, numpy.inf).argmin(axis=1)
        parts[every, rank, used[every, rank]] = expert
        work[every, rank] += numpy.maximum(weights[expert], 0)
        used[every, rank] += 1
    if before is not None:
        parts = _kept(parts, before.reshape(nodes, ranks, -1))
    return _ascending(parts.reshape(nodes * ranks, slots), len(loads))


def _kept(parts: numpy.ndarray, before: numpy.ndarray) -> numpy.ndarray:
    """Returns each node's parts, reordered to the ranks that hold most of them, the largest overlap first."""
    nodes, ranks, _ = parts.shape
    same = parts[:, None, :, :, None] == before[:, :, None, None, :]
    left = (same & (parts != EMPTY)[:, None, :, :, None]).sum(axis=(3, 4))  # by rank and part
    result, every = numpy.empty_like(parts), numpy.arange(nodes)
    for _ in range(ranks):
        rank, part = numpy.divmod(left.reshape(nodes, -1).argmax(axis=1), ranks)
        result[every, rank] = parts[every, part]
        left[every, rank, :] = -1
        left[every, :, part] = -1
    return result


def _ascending(table: numpy.ndarray, experts: int) -> numpy.ndarray:
    ordered = numpy.sort(numpy.where(table == EMPTY, experts, table), axis=1)
    return numpy.where(ordered == experts, EMPTY, ordered)
