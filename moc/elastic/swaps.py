"""Exchanges experts between pairs of nodes while this increases survival."""

from __future__ import annotations

import itertools

import numpy

from moc.elastic.subsets import masks, sizes

MOST_NODES = 10
"""With more nodes, trying all pairs takes too long."""


def improved(table: numpy.ndarray, experts: int) -> numpy.ndarray:
    """Returns a placement of the same replicas that no exchange of two improves.

    Args:
        table: experts by node and slot, int64[nodes, slots], negative for empty slots.
        experts: total number of experts.
    """
    search = _Search(table, experts)
    while sum(search.exchange(*pair) for pair in itertools.combinations(range(len(table)), 2)):
        pass
    return search.table


class _Search:
    """A placement that is improved in place, and for each expert the choices of lost nodes that lose it."""

    def __init__(self, table: numpy.ndarray, experts: int):
        self.table = table.copy()
        nodes = len(table)
        size = sizes(nodes)
        self._choices = numpy.argsort(size, kind="stable")  # choices of lost nodes, fewest first
        self._starts = numpy.searchsorted(size[self._choices], numpy.arange(nodes + 1))
        self._held = numpy.zeros((experts + 1, nodes), numpy.int64)  # last row: empty slots
        numpy.add.at(self._held, (table, numpy.arange(nodes)[:, None]), 1)
        self._died = self._deaths(numpy.arange(experts + 1), self._held)
        self._dead = self._died.sum(axis=0, dtype=numpy.int16)
        self._best = self._survived(self._dead)[0]

    def exchange(self, one: int, other: int) -> bool:
        """Makes the best exchange between two nodes, and returns True, if it survives more losses."""
        mine, theirs = self.table[one], self.table[other]
        after, before = self._after(mine, one, other), self._after(theirs, other, one)
        dead = self._dead + (after - self._died[mine])[:, None] + (before - self._died[theirs])[None, :]
        dead[mine[:, None] == theirs[None, :]] = self._dead
        reached = self._survived(dead.reshape(-1, dead.shape[-1]))
        best = max(range(len(reached)), key=reached.__getitem__)
        if reached[best] <= self._best:
            return False
        here, there = divmod(best, len(theirs))
        x, y = int(mine[here]), int(theirs[there])
        self._best, self._dead = reached[best], dead[here, there].copy()
        self._died[x], self._died[y] = after[here], before[there]
        self._held[[x, y], [one, other]] -= 1
        self._held[[x, y], [other, one]] += 1
        self.table[one, here], self.table[other, there] = y, x
        return True

    def _after(self, experts: numpy.ndarray, source: int, target: int) -> numpy.ndarray:
        """Returns the choices that lose each of a node's experts after one of its replicas has moved."""
        held = self._held[experts]
        held[:, source] -= 1
        held[:, target] += 1
        return self._deaths(experts, held)

    def _deaths(self, experts: numpy.ndarray, held: numpy.ndarray) -> numpy.ndarray:
        mask = numpy.array(masks(held > 0))[:, None]
        died = (self._choices & mask) == mask
        died[(experts < 0) | (experts == len(self._held) - 1)] = False  # an empty slot is never lost
        return died.astype(numpy.int16)

    def _survived(self, dead: numpy.ndarray) -> list[list[int]]:
        """Returns the choices without a lost expert, by number of lost nodes, for each row."""
        return numpy.add.reduceat(numpy.atleast_2d(dead) == 0, self._starts, axis=1, dtype=numpy.int64).tolist()
