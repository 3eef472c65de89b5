"""Exchanges experts between pairs of nodes, as long as more losses are survived."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy

from moc.elastic.subsets import deaths, masks, survived

MOST_NODES = 10
"""With more, trying all pairs takes longer than it is worth."""


def improved(table: numpy.ndarray, experts: int) -> numpy.ndarray:
    """A placement of the same replicas of which no exchange of two survives more losses.

    Args:
        table: experts by node and slot, int64[nodes, slots], negative where there is none.
        experts: in all.
    """
    table = table.copy()
    while any(_exchanged(table, experts)):
        pass
    return table


def _exchanged(table: numpy.ndarray, experts: int) -> Iterator[bool]:
    """Makes each exchange that improves the table, and yields."""
    nodes, slots = table.shape
    held = [[int((row == expert).sum()) for row in table] for expert in (*range(experts), -1)]
    died = [deaths([mask], nodes) for mask in masks(numpy.array(held[:experts]) > 0)]
    died.append(numpy.zeros_like(died[0]))  # an empty slot
    dead = sum(died[1:], died[0])
    best = survived(dead, nodes)
    for (one, other), here, there in itertools.product(
        itertools.combinations(range(nodes), 2), range(slots), range(slots)
    ):
        x, y = int(table[one, here]), int(table[other, there])
        if x == y:
            continue
        changed = {e: _died_after(held[e], step) for e, step in ((x, (one, other)), (y, (other, one))) if e >= 0}
        after = dead + sum(new - died[e] for e, new in changed.items())
        reached = survived(after, nodes)
        if reached > best:
            best, dead = reached, after
            for e, (source, target) in ((x, (one, other)), (y, (other, one))):
                held[e][source] -= 1
                held[e][target] += 1
                died[e] = changed.get(e, died[e])
            table[one, here], table[other, there] = y, x
            yield True


def _died_after(held: list[int], step: tuple[int, int]) -> numpy.ndarray:
    source, target = step
    after = list(held)
    after[source] -= 1
    after[target] += 1
    return deaths([sum(1 << node for node, count in enumerate(after) if count > 0)], len(after))
