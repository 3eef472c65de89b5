"""Which replica computes which tokens (Lazarus, section 4.2), in integers and without padding.

Each rank computes the same capacities from the same counts, and what it sends and receives from those.  Algorithm 1
gives shares that are no integers, and does not say how they are rounded; here sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy

from moc.elastic.domains import spans

Capacities = Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray]
"""From tokens of each expert [experts] and replicas [experts, ranks] to tokens that each rank computes, of the same
shape as the replicas, int64.  A row sums to the tokens of its expert, and is 0 where there is no replica."""


@dataclass(frozen=True)
class Exchange:
    """What one rank sends and receives, in tokens, int64[experts, ranks]; its own tokens are in both.

    Tokens are sorted by expert, and stably; an expert's first tokens go to the lowest rank that gets some of it.

    Attributes:
        sends: to each rank.
        receives: from each rank.
    """

    sends: numpy.ndarray
    receives: numpy.ndarray


def level(tokens: numpy.ndarray, replicas: numpy.ndarray, before: numpy.ndarray | None = None) -> numpy.ndarray:
    """Capacities that fill up the least loaded ranks, expert by expert, from that with fewest replicas.

    Args:
        tokens: of each expert, int64[experts].
        replicas: of each expert on each rank, [experts, ranks]; each expert with tokens has some.
        before: what each rank has to do already, int64[ranks]; nothing by default.

    Returns:
        As :data:`Capacities` says.
    """
    result = numpy.zeros(replicas.shape, numpy.int64)
    loads = numpy.zeros(replicas.shape[1], numpy.int64) if before is None else before.astype(numpy.int64)
    for expert, ranks, share in _levelled(tokens, replicas, loads):
        result[expert, ranks] = share
    return result


def work(tokens: numpy.ndarray, replicas: numpy.ndarray) -> numpy.ndarray:
    """Tokens that each rank computes by :func:`level`, int64[ranks]."""
    loads = numpy.zeros(replicas.shape[1], numpy.int64)
    for _ in _levelled(tokens, replicas, loads):
        pass
    return loads


def work_of(tokens: numpy.ndarray, replicas: numpy.ndarray, sizes: Sequence[int]) -> numpy.ndarray:
    """Tokens that each rank computes if each domain levels its own, and all ranks have equally many of each expert.

    Args:
        tokens: of each expert, int64[experts].
        replicas: of each expert on each rank, [experts, ranks].
        sizes: ranks of each domain.

    Returns:
        int64[ranks]; the sum is that of the tokens.
    """
    until = numpy.cumsum(sizes)
    shares = numpy.diff(tokens[:, None] * until // until[-1], axis=1, prepend=0)
    return numpy.concatenate(
        [work(shares[:, number], replicas[:, domain]) for number, domain in enumerate(spans(sizes))]
    )


def _levelled(
    tokens: numpy.ndarray, replicas: numpy.ndarray, loads: numpy.ndarray
) -> Iterator[tuple[int, numpy.ndarray, numpy.ndarray]]:
    """Experts with tokens, their ranks, and what each of those gets, which is added to ``loads``."""
    held = replicas > 0
    for expert in numpy.argsort(held.sum(axis=1), kind="stable").tolist():
        if tokens[expert]:
            ranks = numpy.flatnonzero(held[expert])
            share = filled_up(loads[ranks], int(tokens[expert]))
            loads[ranks] += share
            yield expert, ranks, share


def filled_up(loads: numpy.ndarray, amount: int) -> numpy.ndarray:
    """What each gets of an amount, so that the least loaded are level: int64, and the sum is the amount."""
    order = numpy.argsort(loads, kind="stable")
    ascending = loads[order]
    below = numpy.arange(1, len(loads) + 1)
    room = ascending * below - numpy.cumsum(ascending)  # that is below each one's load
    count = int(numpy.searchsorted(room, amount, side="right"))
    height, more = divmod(amount + int(ascending[:count].sum()), count)
    result = numpy.zeros(len(loads), numpy.int64)
    result[order[:count]] = height - ascending[:count]
    result[order[:more]] += 1
    return result


def even(tokens: numpy.ndarray, replicas: numpy.ndarray) -> numpy.ndarray:
    """Capacities in proportion to the replicas on a rank (Algorithm 1, lines 1 to 6), as :data:`Capacities` says."""
    until = numpy.cumsum(replicas, axis=1, dtype=numpy.int64)
    total = numpy.maximum(until[:, -1:], 1)
    return numpy.diff(tokens[:, None] * until // total, axis=1, prepend=0)


def exchange(counts: numpy.ndarray, capacities: numpy.ndarray, rank: int) -> Exchange:
    """What a rank sends and receives: its own tokens stay as far as it has the capacity (Algorithm 1, line 7).

    The others, of all ranks in order, are cut into what the ranks in order have left.  So there are at most 2 D - 1
    messages of an expert among D ranks.

    Args:
        counts: tokens of each expert that each rank has, int64[experts, ranks].
        capacities: of the same shape, with the same sum for each expert.
        rank: whose part is returned.
    """
    stays = numpy.minimum(counts, capacities)
    left, room = numpy.cumsum(counts - stays, axis=1), numpy.cumsum(capacities - stays, axis=1)
    sends, receives = _overlap(left, room, rank), _overlap(room, left, rank)
    sends[:, rank] = receives[:, rank] = stays[:, rank]
    return Exchange(sends, receives)


def _overlap(ends: numpy.ndarray, others: numpy.ndarray, rank: int) -> numpy.ndarray:
    """Of a rank's interval, which ends at ``ends``, how much lies within each of the others'."""
    stop = ends[:, rank, None]
    start = ends[:, rank - 1, None] if rank else numpy.zeros_like(stop)
    return numpy.diff(numpy.clip(others, start, stop), axis=1, prepend=start)
