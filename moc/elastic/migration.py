"""Assigns the parts of a new placement to nodes so that few experts move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy

from moc.elastic.placement import holders

_BLOCK = 128
"""Maximum number of nodes that exchange parts with each other; the time grows with its square."""


def columns(
    before: Mapping[int, numpy.ndarray], wanted: Mapping[int, numpy.ndarray], experts: int, stood: Sequence[int | None]
) -> numpy.ndarray:
    """Gives each node a column of a placement: a row of each layer's table.

    All layers have the same permutation: the probability of survival is then the same as for one layer, which is the
    purpose of maximum rank overlap. All permutations survive equally, so the fewest moved experts decide. Nodes keep
    their order, with new ones last, and exchange columns within blocks of 128.

    Args:
        before: by layer, the experts of each node, [nodes, slots]; negative for empty slots.
        wanted: by layer, the placement, [nodes, slots].
        experts: experts of a layer.
        stood: column of each node in the previous placement; None for new nodes.

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
    """Assigns a column to each row, for a large sum: the largest gains first, then exchanges of two.

    Args:
        shared: gain of each row with each column, [n, n].
    """
    size = len(shared)
    left, result = shared.astype(float), numpy.empty(size, numpy.int64)
    for _ in range(size):
        row, column = divmod(int(left.argmax()), size)
        result[row] = column
        left[row, :] = left[:, column] = -1
    while True:
        gained = shared[:, result]  # gain of each row with the column of each row
        own = gained.diagonal()
        gain = gained + gained.T - own[:, None] - own[None, :]
        one, other = divmod(int(gain.argmax()), size)
        if gain[one, other] <= 0:
            return result
        result[one], result[other] = result[other], result[one]


def _shared(before: numpy.ndarray, wanted: numpy.ndarray, experts: int) -> numpy.ndarray:
    """Returns the number of experts shared by each row of before and wanted, [rows before, rows wanted]."""
    held = numpy.vstack([holders(wanted, experts), numpy.zeros((1, len(wanted)), numpy.int16)])  # last row: empty slots
    return sum(held[before[:, slot]] for slot in range(1, before.shape[1])) + held[before[:, 0]]
