"""Places the replicas of a layer's experts on nodes (Lazarus, section 4.1 and appendix A.1).

Maximum rank overlap (MRO): experts form groups of the size of a node's slots, fewest replicas first. Each node with a
group's first expert, its representative, has the complete group. So all experts survive if all representatives do.

No placement survives more losses of any number of nodes if the nodes suffice for all representatives. Theorem 1 omits
this condition, and fails without it: the last group then has fewer nodes than its experts have replicas. Here, the last
groups are spread over the remaining nodes, with the number of groups that survives most. Up to ten nodes, exchanges of
two replicas follow while they increase survival.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy

from moc.elastic import ElasticError
from moc.elastic.allocation import allocate_distinct, ascending, least_replicas
from moc.elastic.survival import masks, score, sizes

EMPTY = -1
"""Marks a slot without an expert."""


def place_by_load(
    loads: Sequence[int], nodes: int, slots: int, least: int, everywhere: int = 0, alike: bool = False
) -> numpy.ndarray:
    """Places the replicas of each expert according to its load.

    Experts with equally many replicas are ordered by number, so that small load changes keep the order.

    Args:
        loads: tokens of each expert.
        nodes: nodes that hold replicas.
        slots: slots of each node.
        least: replicas of each expert, if they fit (:func:`moc.elastic.allocation.least_replicas`).
        everywhere: number of hottest experts on every node.
        alike: form the same groups for any number of nodes. Experts with equally many replicas are then ordered by
            load, since their replicas may differ for another number of nodes.

    Returns:
        Experts by node and slot, int64[nodes, slots], each at most once per node; :data:`EMPTY` if the node has all.

    Raises:
        ValueError: the slots do not suffice.
    """
    coldest_first = ascending(loads)
    least = least_replicas(least, len(loads) - everywhere, nodes, slots - everywhere)
    replicas = allocate_distinct(loads, nodes, slots, least, everywhere)
    order = coldest_first if alike else range(len(loads))
    numbers = numpy.array([*order, EMPTY])  # EMPTY (-1) is the last index
    hottest = [order.index(expert) for expert in coldest_first[len(loads) - everywhere :]]
    table = place([replicas[expert] for expert in order], nodes, slots, hottest)
    return distinct(numbers[table], coldest_first[::-1])


def place(replicas: Sequence[int], nodes: int, slots: int, everywhere: Sequence[int] = ()) -> numpy.ndarray:
    """Places replicas so that a replica of each expert survives the most simultaneous node losses.

    Args:
        replicas: replicas of each expert, at most ``nodes * slots`` in total.
        nodes: nodes that hold them.
        slots: slots of each node.
        everywhere: experts that every node has, in its first slots; the others use the remaining slots.

    Returns:
        Experts by node and slot, int64[nodes, slots], or :data:`EMPTY`. A node may have several replicas of an expert
        if the others are full: they are weights of the dispatcher (:func:`distinct`).

    Raises:
        ValueError: the replicas do not fit.
    """
    if sum(replicas) > nodes * slots:
        raise ElasticError(
            f"{sum(replicas)} replicas do not fit on {nodes} nodes of {slots} slots. Fix: raise the slots per node, or "
            "lower the replicas",
            code="slots-too-few",
        )
    others = [expert for expert in ascending(replicas) if expert not in everywhere]
    table = numpy.full((nodes, slots), EMPTY, numpy.int64)
    table[:, : len(everywhere)] = everywhere
    if others:
        placed = _placed(tuple(replicas[expert] for expert in others), nodes, slots - len(everywhere))
        table[:, len(everywhere) :] = numpy.where(placed == EMPTY, EMPTY, numpy.array(others)[placed])
    return table


def distinct(table: numpy.ndarray, hottest_first: Sequence[int]) -> numpy.ndarray:
    """Returns the placement with each expert once per node; other experts get the repeated and empty slots.

    A second replica of an expert on a node would duplicate its weights. Another expert survives more losses, and can
    take load off other nodes.

    Args:
        table: a table from :func:`place`.
        hottest_first: all experts, in the order of getting slots.
    """
    nodes, slots = table.shape
    held = holders(table, len(hottest_first)) > 0
    result = _once(table)
    used = (result != EMPTY).sum(axis=1)
    for expert in hottest_first:
        more = numpy.flatnonzero((used < slots) & ~held[expert])
        result[more, used[more]] = expert
        used[more] += 1
    return result


def _once(table: numpy.ndarray) -> numpy.ndarray:
    """Returns each node's experts without repetition, followed by its empty slots."""
    result = numpy.full_like(table, EMPTY)
    used, every = numpy.zeros(len(table), numpy.int64), numpy.arange(len(table))
    for slot in range(table.shape[1]):
        expert = table[:, slot]
        fresh = every[(expert != EMPTY) & ~(result == expert[:, None]).any(axis=1)]
        result[fresh, used[fresh]] = expert[fresh]
        used[fresh] += 1
    return result


def holders(table: numpy.ndarray, experts: int) -> numpy.ndarray:
    """Returns the replicas of each expert on each node, int16[experts, nodes], from a table of :func:`place`."""
    nodes, slots = table.shape
    found = numpy.zeros((experts + 1, nodes), numpy.int16)  # last row: empty slots
    for slot in range(slots):
        found[table[:, slot], numpy.arange(nodes)] += 1
    return found[:experts]


def representatives(replicas: Sequence[int], slots: int) -> list[int]:
    """Returns the replicas of the first expert of each group, ascending."""
    return sorted(replicas)[::slots]


def cyclic(replicas: Sequence[int], nodes: int, slots: int) -> numpy.ndarray:
    """Returns the placement "spread" of section 6.3: replicas are dealt to the nodes in turn."""
    return _around(numpy.repeat(numpy.arange(len(replicas)), replicas), nodes, slots)


def compact(replicas: Sequence[int], nodes: int, slots: int) -> numpy.ndarray:
    """Returns the placement "compact" of section 6.3: nodes are filled one after the other."""
    row = numpy.repeat(numpy.arange(len(replicas)), replicas)
    return numpy.append(row, numpy.full(nodes * slots - len(row), EMPTY)).reshape(nodes, slots)


def overlapped(replicas: Sequence[int], nodes: int, slots: int, groups: int | None = None) -> numpy.ndarray:
    """Returns the MRO placement of the first groups; other replicas are spread over the remaining nodes.

    Args:
        replicas: replicas of each expert, ascending.
        nodes: nodes that hold them.
        slots: slots of each node.
        groups: number of groups placed by MRO; all by default.
    """
    table = numpy.full((nodes, slots), EMPTY, numpy.int64)
    left, start = numpy.array(replicas), 0
    firsts = range(0, len(replicas), slots)[: groups if groups is not None else len(replicas)]
    for first in firsts:
        group = numpy.arange(first, min(first + slots, len(replicas)))
        stop = min(start + int(replicas[first]), nodes)
        table[start:stop, : len(group)] = group
        left[group] -= stop - start
        start = stop
    _fill(table, left, start)
    return table


@functools.lru_cache(maxsize=64)  # the search for h repeats placements
def _placed(replicas: tuple[int, ...], nodes: int, slots: int) -> numpy.ndarray:
    """Returns the best placement found for replicas in ascending order."""
    best = overlapped(replicas, nodes, slots)
    if sum(representatives(replicas, slots)) <= nodes:
        return best
    experts = len(replicas)
    found = best, score(holders(best, experts))
    for table in _candidates(replicas, nodes, slots):
        reached = score(holders(table, experts))
        if reached > found[1]:
            found = table, reached
    return improved(found[0], experts) if nodes <= MOST_NODES else found[0]


def _candidates(replicas: Sequence[int], nodes: int, slots: int) -> Iterator[numpy.ndarray]:
    groups = -(-len(replicas) // slots)
    for spread in sorted({2, 3, 4, groups}):
        if spread <= groups:
            yield overlapped(replicas, nodes, slots, groups - spread)


def _fill(table: numpy.ndarray, left: numpy.ndarray, start: int) -> None:
    """Puts the remaining replicas into free slots, slot by slot, so that few nodes get an expert twice.

    Experts of the last group, which has free slots on its own nodes, are first: they go to the nodes from ``start`` on,
    which hold none of them.
    """
    nodes, slots = table.shape
    row = numpy.repeat(numpy.arange(len(left))[::-1], left[::-1])
    free = numpy.arange(nodes)
    free = numpy.concatenate([free[start:], free[:start]])
    node, slot = (axis.ravel() for axis in numpy.meshgrid(free, numpy.arange(slots)))
    vacant = numpy.flatnonzero(table[node, slot] == EMPTY)[: len(row)]
    table[node[vacant], slot[vacant]] = row


def _around(row: numpy.ndarray, nodes: int, slots: int) -> numpy.ndarray:
    filled = numpy.append(row, numpy.full(nodes * slots - len(row), EMPTY))
    return numpy.ascontiguousarray(filled.reshape(slots, nodes).T)


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
