"""Chooses the number of experts on every node (h), and the minimum number of replicas (f)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from moc.elastic.allocation import least_replicas, most_everywhere
from moc.elastic.dispatch import work
from moc.elastic.placement import holders, place_by_load

TOLERATED = 1.05
"""Work of the busiest node relative to the mean; below this, further experts on every node gain little."""


def everywhere(loads: Sequence[Sequence[int]], nodes: int, slots: int, least: int, alike: bool = False) -> int:
    """Returns the minimum number of hottest experts on every node that balances the work.

    Maximum rank overlap puts cold experts on the same few nodes, which have little work. Each slot for a hot expert
    there creates more groups of cold experts, and so lowers survival.

    Args:
        loads: tokens of each expert, by layer.
        nodes: nodes that hold replicas.
        slots: slots of each node.
        least: replicas of each expert, reduced if they do not fit.
        alike: as in :func:`moc.elastic.placement.place_by_load`.

    Returns:
        The smallest number for which the busiest node has at most 1.05 times the mean work, averaged over layers. If
        there is none, the number with the least work on the busiest node.

    Raises:
        ValueError: the slots do not suffice for all experts.
    """
    experts, found = len(loads[0]), []
    for count in range(min(most_everywhere(least, experts, nodes, slots), experts - 1) + 1):
        tables = [place_by_load(row, nodes, slots, least, count, alike) for row in loads]
        found.append(float(numpy.mean([imbalance(row, table) for row, table in zip(loads, tables, strict=True)])))
        if found[-1] <= TOLERATED:
            return count
    return int(numpy.argmin(found))


def imbalance(loads: Sequence[int], table: numpy.ndarray) -> float:
    """Returns the work of the busiest node divided by the mean, as balanced by the dispatcher."""
    tokens = numpy.asarray(loads, numpy.int64)
    done = work(tokens, holders(table, len(tokens)))
    return float(done.max() / done.mean()) if tokens.any() else 1.0


def least(losses: Sequence[int], experts: int, nodes: int, slots: int) -> int:
    """Returns the fewest replicas that are certain to survive 99 % of losses; fewer if they do not fit.

    Args:
        losses: nodes lost simultaneously, for each observed loss; 1 is assumed before the first loss.
        experts: experts of a layer.
        nodes: nodes that hold replicas.
        slots: slots of each node.

    Raises:
        ValueError: the slots do not suffice for all experts.
    """
    seen = sorted(losses) or [1]
    wanted = seen[min(int(0.99 * len(seen)), len(seen) - 1)] + 1
    return least_replicas(wanted, experts, nodes, slots)
