"""Which node takes which part of a new placement, so that it holds as much of it as possible already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy

from moc.elastic.placement import holders

_BLOCK = 128
"""Nodes among which parts are exchanged; more cost time with its square."""


def columns(
    before: Mapping[int, numpy.ndarray], wanted: Mapping[int, numpy.ndarray], experts: int, stood: Sequence[int | None]
) -> numpy.ndarray:
    """Gives each node a column of a placement: a row of each layer's table.

    One permutation for all layers: that the probability of survival is that of a layer, and not of all of them
    independently of one another, is what maximum rank overlap is for.  Any one survives alike, so that the fewest moved
    experts decide.  Nodes keep their order, with new ones last, and exchange columns within blocks of 128.

    Args:
        before: by layer, what each node holds, [nodes, slots], negative for nothing.
        wanted: by layer, the placement, [nodes, slots].
        experts: of a layer.
        stood: column of each node in the placement before; None for new nodes.

    Returns:
        The column of each node.
    """
    nodes = len(stood)
    order = numpy.array(sorted(range(nodes), key=lambda node: (stood[node] is None, stood[node] or 0, node)))
    result = numpy.empty(nodes, numpy.int64)
    for start in range(0, nodes, _BLOCK):
        block = order[start : start + _BLOCK]
        part = slice(start, start + len(block))
        shared = sum(_shared(before[layer][block], table[part], experts) for layer, table in wanted.items())
        result[block] = start + matched(numpy.asarray(shared))
    return result


def matched(shared: numpy.ndarray) -> numpy.ndarray:
    """Assigns a column to each row, for a large sum: the largest first, then exchanges of two.

    Args:
        shared: what a row gains with a column, [n, n].
    """
    size = len(shared)
    left, result = shared.astype(float), numpy.empty(size, numpy.int64)
    for _ in range(size):
        row, column = divmod(int(left.argmax()), size)
        result[row] = column
        left[row, :] = left[:, column] = -1
    while True:
        gained = shared[:, result]  # by row, and row whose column it would have
        own = gained.diagonal()
        gain = gained + gained.T - own[:, None] - own[None, :]
        one, other = divmod(int(gain.argmax()), size)
        if gain[one, other] <= 0:
            return result
        result[one], result[other] = result[other], result[one]


def _shared(before: numpy.ndarray, wanted: numpy.ndarray, experts: int) -> numpy.ndarray:
    """Experts of a row before that are in a row that is wanted, [rows before, rows wanted]."""
    held = numpy.vstack([holders(wanted, experts), numpy.zeros((1, len(wanted)), numpy.int16)])  # the last: no expert
    return sum(held[before[:, slot]] for slot in range(1, before.shape[1])) + held[before[:, 0]]
