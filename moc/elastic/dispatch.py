"""Assigns tokens to replicas (Lazarus, section 4.2), in integers and without padding.

All ranks compute the same capacities from the same counts, and derive their sends and receives from them. Algorithm 1
yields fractional shares and does not define their rounding; here, sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy

from moc.elastic.allocation import domain_slices

Capacities = Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray]
"""Function from tokens [experts] and replicas [experts, ranks] to tokens that each rank computes.

The result is int64[experts, ranks]. A row sums to the tokens of its expert, and is 0 on ranks without a replica.
"""


@dataclass(frozen=True)
class Exchange:
    """Tokens that one rank sends and receives, int64[experts, ranks]; its own tokens are in both.

    Tokens are sorted stably by expert. An expert's first tokens go to the lowest rank that receives any.
    """

    sends: numpy.ndarray
    receives: numpy.ndarray


def level_capacities(
    tokens: numpy.ndarray, replicas: numpy.ndarray, initial_loads: numpy.ndarray | None = None
) -> numpy.ndarray:
    """Returns capacities that fill the least loaded ranks, expert by expert, fewest replicas first.

    Args:
        tokens: tokens of each expert, int64[experts].
        replicas: replicas of each expert on each rank, [experts, ranks]; each expert with tokens has at least one.
        initial_loads: existing load of each rank, int64[ranks]; none by default.

    Returns:
        Tokens in the form of :data:`Capacities`.
    """
    result = numpy.zeros(replicas.shape, numpy.int64)
    loads = [0] * replicas.shape[1] if initial_loads is None else initial_loads.tolist()
    experts, ranks, shares = [], [], []
    for expert, holder_ranks, share in _assign_to_least_loaded(tokens, replicas, loads):
        experts += [expert] * len(holder_ranks)
        ranks += holder_ranks
        shares += share
    result[experts, ranks] = shares
    return result


def tokens_per_rank(tokens: numpy.ndarray, replicas: numpy.ndarray) -> numpy.ndarray:
    """Returns the tokens that each rank computes by :func:`level_capacities`, int64[ranks]."""
    loads = [0] * replicas.shape[1]
    for _ in _assign_to_least_loaded(tokens, replicas, loads):
        pass
    return numpy.array(loads, numpy.int64)


def tokens_per_rank_in_domains(tokens: numpy.ndarray, replicas: numpy.ndarray, sizes: Sequence[int]) -> numpy.ndarray:
    """Returns the tokens that each rank computes if domains balance theirs, and all ranks have equal counts per expert.

    Args:
        tokens: tokens of each expert, int64[experts].
        replicas: replicas of each expert on each rank, [experts, ranks].
        sizes: ranks of each domain.

    Returns:
        int64[ranks]; the sum is the number of tokens.
    """
    cumulative = numpy.cumsum(sizes)
    shares = numpy.diff(tokens[:, None] * cumulative // cumulative[-1], axis=1, prepend=0)
    return numpy.concatenate(
        [tokens_per_rank(shares[:, number], replicas[:, domain]) for number, domain in enumerate(domain_slices(sizes))]
    )


def _assign_to_least_loaded(
    tokens: numpy.ndarray, replicas: numpy.ndarray, loads: list[int]
) -> Iterator[tuple[int, list[int], list[int]]]:
    """Yields experts with tokens, their ranks, and the share of each rank, which is added to ``loads``.

    Lists, because this runs for each layer and micro batch, and experts have few replicas.
    """
    experts, ranks = numpy.nonzero(replicas > 0)
    ends = numpy.searchsorted(experts, numpy.arange(len(replicas) + 1)).tolist()
    holders, amounts = ranks.tolist(), tokens.tolist()
    for expert in sorted(range(len(replicas)), key=lambda expert: ends[expert + 1] - ends[expert]):
        if amounts[expert]:
            holder_ranks = holders[ends[expert] : ends[expert + 1]]
            share = water_fill([loads[rank] for rank in holder_ranks], amounts[expert])
            for rank, assigned in zip(holder_ranks, share, strict=True):
                loads[rank] += assigned
            yield expert, holder_ranks, share


def water_fill(loads: Sequence[int], amount: int) -> list[int]:
    """Returns the shares of an amount that level the smallest loads; the sum is the amount."""
    if len(loads) == 1:
        return [amount]
    order = sorted(range(len(loads)), key=loads.__getitem__)
    count = total = 0
    for index in order:
        if loads[index] * count - total > amount:
            break
        count, total = count + 1, total + loads[index]
    height, remainder = divmod(amount + total, count)
    result = [0] * len(loads)
    for number, index in enumerate(order[:count]):
        result[index] = height - loads[index] + (number < remainder)
    return result


def even_capacities(tokens: numpy.ndarray, replicas: numpy.ndarray) -> numpy.ndarray:
    """Returns capacities in proportion to the replicas on a rank (Algorithm 1, lines 1 to 6; :data:`Capacities`)."""
    cumulative = numpy.cumsum(replicas, axis=1, dtype=numpy.int64)
    total = numpy.maximum(cumulative[:, -1:], 1)
    return numpy.diff(tokens[:, None] * cumulative // total, axis=1, prepend=0)


def exchange_of_rank(counts: numpy.ndarray, capacities: numpy.ndarray, rank: int) -> Exchange:
    """Returns the sends and receives of a rank; its own tokens stay up to its capacity (Algorithm 1, line 7).

    The remaining tokens in rank order fill the remaining capacities in rank order. So D ranks send at most 2 D - 1
    messages per expert.

    Args:
        counts: tokens of each expert on each rank, int64[experts, ranks].
        capacities: of the same shape, with the same sum for each expert.
        rank: the rank.
    """
    local_tokens = numpy.minimum(counts, capacities)
    surplus, free = numpy.cumsum(counts - local_tokens, axis=1), numpy.cumsum(capacities - local_tokens, axis=1)
    sends, receives = _overlap(surplus, free, rank), _overlap(free, surplus, rank)
    sends[:, rank] = receives[:, rank] = local_tokens[:, rank]
    return Exchange(sends, receives)


def _overlap(ends: numpy.ndarray, other_ends: numpy.ndarray, rank: int) -> numpy.ndarray:
    """Returns how much of a rank's interval, which ends at ``ends``, lies in each interval of ``other_ends``."""
    stop = ends[:, rank, None]
    start = ends[:, rank - 1, None] if rank else numpy.zeros_like(stop)
    return numpy.diff(numpy.clip(other_ends, start, stop), axis=1, prepend=start)
