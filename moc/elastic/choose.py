"""Chooses how many experts are on every node (h), and how many replicas each has at least (f)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from moc.elastic.allocation import least_replicas, most_everywhere
from moc.elastic.dispatch import work
from moc.elastic.placement import holders, place_by_load

TOLERATED = 1.05
"""Work of the busiest node by that of the mean, below which another hot expert on every node brings little."""


def everywhere(loads: Sequence[Sequence[int]], nodes: int, slots: int, least: int, alike: bool = False) -> int:
    """The fewest hottest experts that must be on every node for levelled work.

    Maximum rank overlap puts cold experts on the same few nodes, which then have little to do, and each slot for a hot
    expert there makes for more groups of cold ones, and so for less survival.

    Args:
        loads: tokens of each expert, of each layer.
        nodes: that hold replicas.
        slots: of each node.
        least: replicas of each expert; what fits of that is kept.
        alike: as in :func:`moc.elastic.placement.place_by_load`.

    Returns:
        The number with which the busiest node has at most 1.05 times the mean work, in the mean over layers; otherwise
        that with which it has least.

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
    """Work of the busiest node by that of the mean, if the dispatcher levels it."""
    tokens = numpy.asarray(loads, numpy.int64)
    done = work(tokens, holders(table, len(tokens)))
    return float(done.max() / done.mean()) if tokens.any() else 1.0


def least(losses: Sequence[int], experts: int, nodes: int, slots: int) -> int:
    """The fewest replicas that survive 99 % of losses for certain; fewer if they do not fit.

    Args:
        losses: nodes lost at once, of each loss that was seen; 1 is assumed of the first one.
        experts: of a layer.
        nodes: that hold replicas.
        slots: of each node.

    Raises:
        ValueError: the slots do not suffice for all experts.
    """
    seen = sorted(losses) or [1]
    wanted = seen[min(int(0.99 * len(seen)), len(seen) - 1)] + 1
    return least_replicas(wanted, experts, nodes, slots)
