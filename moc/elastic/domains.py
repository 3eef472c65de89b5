"""Cuts ranks into domains, within which tokens are dispatched; each domain has all experts.

Token counts are experts x ranks integers for each layer and micro batch; domains limit their size. Gradients and
survival span all domains: a replica in another domain counts as much.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

MOST_RANKS = 256
"""Default maximum ranks of a domain: with 256 experts, the counts of a micro batch are 0.5 MB."""


def cut(nodes: int, ranks: int, slots: int, experts: int, most: int = MOST_RANKS) -> tuple[int, ...]:
    """Cuts nodes into the fewest domains that have at most ``most`` ranks and all experts.

    If such domains had no room for all experts, there are fewer and larger ones.

    Args:
        nodes: total number of nodes.
        ranks: ranks of a node.
        slots: expert slots of a node.
        experts: experts of a layer.
        most: maximum ranks of a domain; a node is in one domain.

    Returns:
        The number of nodes of each domain, larger ones first; they differ by one at most.
    """
    if experts:
        least = -(-experts // slots) if slots else nodes
    else:
        least = 0  # every node has all experts
    of_most = max(1, most // ranks)
    count = max(1, min(-(-nodes // of_most), nodes // max(1, least)))
    size, larger = divmod(nodes, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def least_in_each(wanted: int, fit: Sequence[int]) -> int:
    """Returns the fewest replicas per domain that reach the wanted total, or the total that fits.

    Args:
        wanted: total replicas (f).
        fit: by domain, the maximum replicas of every expert.
    """
    reached = min(wanted, sum(fit))
    return next(each for each in itertools.count(1) if sum(min(each, most) for most in fit) >= reached)


def spans(sizes: Sequence[int]) -> list[slice]:
    """Returns the slice of each domain in a sequence ordered by domain; sizes are in any unit."""
    stops = [*itertools.accumulate(sizes)]
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
