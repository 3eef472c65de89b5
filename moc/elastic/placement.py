"""On which nodes the replicas of a layer's experts are (Lazarus, section 4.1 and appendix A.1).

Maximum rank overlap (MRO): experts, from the one with fewest replicas on, form groups of as many as a node has slots.
A group's first expert is its representative, and wherever that is, the whole group is.  So all experts survive where
the representatives do.

No placement survives more losses of any number of nodes, if the nodes suffice for all representatives.  Theorem 1 does
not ask for that, and fails where they do not: the last group then has fewer nodes than its experts have replicas.
Here the last groups are spread over the nodes that are left, in as many as survives most.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy

from moc.elastic.allocation import allocate_distinct, ascending, least_replicas
from moc.elastic.errors import ElasticError
from moc.elastic.survival import score
from moc.elastic.swaps import MOST_NODES, improved

EMPTY = -1
"""A slot without an expert."""


def place_by_load(
    loads: Sequence[int], nodes: int, slots: int, least: int, everywhere: int = 0, alike: bool = False
) -> numpy.ndarray:
    """Places as many replicas of each expert as its load asks for.

    Experts with equally many replicas are in the order of their numbers, which stays when loads change a little.

    Args:
        loads: tokens of each expert.
        nodes: that hold replicas.
        slots: of each node.
        least: replicas of each expert, if they fit (:func:`moc.elastic.allocation.least_replicas`).
        everywhere: of the hottest experts, so many are on every node.
        alike: groups are to be those of more or fewer nodes; so experts with equally many replicas are in the order of
            their loads, since on another number of nodes they may have unequally many.

    Returns:
        Experts by node and slot, int64[nodes, slots], each once on a node; :data:`EMPTY` where all are there already.

    Raises:
        ValueError: the slots do not suffice.
    """
    coldest_first = ascending(loads)
    least = least_replicas(least, len(loads) - everywhere, nodes, slots - everywhere)
    replicas = allocate_distinct(loads, nodes, slots, least, everywhere)
    order = coldest_first if alike else range(len(loads))
    numbers = numpy.array([*order, EMPTY])  # EMPTY is the last
    hottest = [order.index(expert) for expert in coldest_first[len(loads) - everywhere :]]
    table = place([replicas[expert] for expert in order], nodes, slots, hottest)
    return distinct(numbers[table], coldest_first[::-1])


def place(replicas: Sequence[int], nodes: int, slots: int, everywhere: Sequence[int] = ()) -> numpy.ndarray:
    """Places replicas so that as many simultaneous losses of nodes as possible leave one of each expert.

    Args:
        replicas: of each expert, at most ``nodes * slots`` in all.
        nodes: that hold them.
        slots: of each node.
        everywhere: experts of which every node has one, in its first slots; the others are placed on the rest.

    Returns:
        Experts by node and slot, int64[nodes, slots], or :data:`EMPTY`.  A node may have several replicas of an expert
        where the others are full: those are weights of the dispatcher (:func:`distinct`).

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
    """The same placement with each expert once on a node; others get the slots of the repeated ones, and empty ones.

    A second replica of an expert on a node would be the same weights once more, where another expert survives more
    losses, and can take load off other nodes.

    Args:
        table: as :func:`place` returns it.
        hottest_first: all experts, in the order in which they get the slots.
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
    """Each node's experts without repetition, before its empty slots."""
    result = numpy.full_like(table, EMPTY)
    used, every = numpy.zeros(len(table), numpy.int64), numpy.arange(len(table))
    for slot in range(table.shape[1]):
        expert = table[:, slot]
        fresh = every[(expert != EMPTY) & ~(result == expert[:, None]).any(axis=1)]
        result[fresh, used[fresh]] = expert[fresh]
        used[fresh] += 1
    return result


def holders(table: numpy.ndarray, experts: int) -> numpy.ndarray:
    """Replicas of each expert on each node, int16[experts, nodes], of what :func:`place` returns."""
    nodes, slots = table.shape
    found = numpy.zeros((experts + 1, nodes), numpy.int16)  # the last one takes the empty slots
    for slot in range(slots):
        found[table[:, slot], numpy.arange(nodes)] += 1
    return found[:experts]


def representatives(replicas: Sequence[int], slots: int) -> list[int]:
    """Replicas of the first expert of each group, the coldest one's first."""
    return sorted(replicas)[::slots]


def cyclic(replicas: Sequence[int], nodes: int, slots: int) -> numpy.ndarray:
    """The placement "spread" of section 6.3: one node after the other, each expert from where the last one ended."""
    return _around(numpy.repeat(numpy.arange(len(replicas)), replicas), nodes, slots)


def compact(replicas: Sequence[int], nodes: int, slots: int) -> numpy.ndarray:
    """The placement "compact" of section 6.3: one node is filled after the other."""
    row = numpy.repeat(numpy.arange(len(replicas)), replicas)
    return numpy.append(row, numpy.full(nodes * slots - len(row), EMPTY)).reshape(nodes, slots)


def overlapped(replicas: Sequence[int], nodes: int, slots: int, groups: int | None = None) -> numpy.ndarray:
    """MRO of the first so many groups, or all; the other replicas are spread over the nodes that are left.

    Args:
        replicas: of each expert, ascending.
        nodes: that hold them.
        slots: of each node.
        groups: at most as many as there are; without it, all.
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


@functools.lru_cache(maxsize=64)  # h is chosen by placing
def _placed(replicas: tuple[int, ...], nodes: int, slots: int) -> numpy.ndarray:
    """The best placement of replicas in ascending order."""
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
    """Puts what is left into vacant slots, level by level, so that few nodes get an expert twice.

    The experts of the last group, which has vacant slots on its own nodes, come first: to the nodes from ``start`` on,
    which hold none of it.
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
