"""Domains: the ranks among which tokens are dispatched, each with all experts.

Counts of tokens are experts x ranks integers for each layer and micro batch, so that many ranks are cut into domains.
Gradients and survival span all of them: replicas in another domain are as good as those in the own one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

MOST_RANKS = 256
"""Of a domain, by default: with 256 experts, the counts of a micro batch are 0.5 MB."""


def cut(nodes: int, ranks: int, slots: int, experts: int, most: int = MOST_RANKS) -> tuple[int, ...]:
    """Cuts nodes into as few domains as have at most so many ranks, and all experts.

    Where a domain would have no room for all experts, there are fewer, and they are larger than ``most``.

    Args:
        nodes: in all.
        ranks: of a node.
        slots: of a node, for experts.
        experts: of a layer.
        most: ranks of a domain; a node is in one domain.

    Returns:
        The nodes of each domain, which differ by one at most, the larger ones first.
    """
    if experts:
        least = -(-experts // slots) if slots else nodes
    else:
        least = 0  # every node has all of them
    of_most = max(1, most // ranks)
    count = max(1, min(-(-nodes // of_most), nodes // max(1, least)))
    size, larger = divmod(nodes, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def least_in_each(wanted: int, fit: Sequence[int]) -> int:
    """The fewest replicas that each domain is asked for, so that there are as many in all as wanted, or as fit.

    Args:
        wanted: replicas in all (f).
        fit: of each domain, the most replicas that it can have of every expert.
    """
    reached = min(wanted, sum(fit))
    return next(each for each in itertools.count(1) if sum(min(each, most) for most in fit) >= reached)


def spans(sizes: Sequence[int]) -> list[slice]:
    """What is in each domain, of what is in order of the domains; sizes are of any unit."""
    stops = [*itertools.accumulate(sizes)]
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
