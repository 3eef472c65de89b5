"""Computes the probability that a simultaneous loss of nodes leaves a replica of every expert.

The result is exact. All choices of lost nodes are equally likely, as in Lazarus' Theorem 1. An expert is lost with its
last holder, so only the sets of holders count, and of these only sets that contain no other. For few nodes, all choices
are enumerated as bit masks; bit i is node i.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from math import comb

import numpy

from moc.errors import UserError

_MAX_ENUMERATED_NODES = 16
"""Maximum number of nodes for an enumeration of all choices of lost nodes."""


class TooManyNodesError(UserError, ValueError):
    """The probability cannot be computed exactly; :func:`survival_lower_bound` bounds it."""

    code = "value-out-of-range"


def survival_probability(replicas: numpy.ndarray, lost: int) -> float:
    """Returns the probability that a replica of each expert is left.

    Args:
        replicas: replicas of each expert on each node, [experts, nodes]; experts of several layers are concatenated.
        lost: nodes lost simultaneously.

    Raises:
        TooManyNodesError: there are more than 16 nodes, the loss can destroy an expert, and holders are not neighbors
            (with MRO, they are).
    """
    nodes = replicas.shape[1]
    return count_survived(replicas, lost)[lost] / comb(nodes, lost) if lost <= nodes else 0.0


def count_survived(replicas: numpy.ndarray, max_lost: int) -> list[int]:
    """Returns, by number of lost nodes up to ``max_lost``, the number of choices that leave a replica of each expert.

    Arguments and errors as in :func:`survival_probability`.
    """
    nodes = replicas.shape[1]
    sets = minimal_holder_sets(replicas)
    if not sets[0].any():  # an expert has no holder
        return [0] * (max_lost + 1)
    if nodes <= _MAX_ENUMERATED_NODES:
        counts = numpy.bincount(
            subset_sizes(nodes)[count_contained_sets(bit_masks(sets), nodes) == 0], minlength=nodes + 1
        )
        return counts.tolist()[: max_lost + 1]
    if max_lost < int(sets.sum(axis=1).min()):
        return [comb(nodes, lost) for lost in range(max_lost + 1)]
    first, size = sets.argmax(axis=1), sets.sum(axis=1)
    last = nodes - 1 - sets[:, ::-1].argmax(axis=1)
    if (last - first + 1 != size).any():
        raise TooManyNodesError(
            f"the exact survival probability of {nodes} nodes cannot be computed: holders are not neighbors, and at "
            f"most {_MAX_ENUMERATED_NODES} nodes are enumerated. Fix: use survival_lower_bound()",
        )
    return _count_without_complete_run(dict(zip(last.tolist(), size.tolist(), strict=True)), nodes, max_lost)


def survival_lower_bound(replicas: numpy.ndarray, lost: int) -> float:
    """Returns a lower bound of :func:`survival_probability` for any number of nodes, by a union bound."""
    nodes = replicas.shape[1]
    if lost > nodes:
        return 0.0
    fatal = sum(
        comb(nodes - size, lost - size) for size in minimal_holder_sets(replicas).sum(axis=1).tolist() if size <= lost
    )
    return max(0.0, 1 - fatal / comb(nodes, lost))


def minimal_holder_sets(replicas: numpy.ndarray) -> numpy.ndarray:
    """Returns the distinct sets of holders that contain no other, smallest first, bool[sets, nodes]."""
    bits = numpy.packbits(replicas > 0, axis=1)
    first = {row.tobytes(): number for number, row in reversed([*enumerate(bits)])}
    numbers = numpy.array(sorted(first.values(), key=lambda number: (int((replicas[number] > 0).sum()), number)))
    words = numpy.pad(bits[numbers], ((0, 0), (0, -bits.shape[1] % 8))).view(numpy.uint64)
    minimal: list[int] = []
    for index in range(len(numbers)):
        smaller = words[minimal]
        if not ((smaller & words[index]) == smaller).all(axis=1).any():
            minimal.append(index)
    return replicas[numbers[minimal]] > 0


def survival_score(replicas: numpy.ndarray) -> tuple[float, ...]:
    """Returns a score that grows with survival, to compare placements of the same replicas.

    It consists of the choices survived, from the smallest loss on. If there are too many choices, it is the smallest
    set of holders, then the expected number of lost sets if nodes are lost with probability 1/2.
    """
    nodes = replicas.shape[1]
    if nodes <= _MAX_ENUMERATED_NODES:
        return tuple(count_survived(replicas, nodes))
    set_sizes = minimal_holder_sets(replicas).sum(axis=1).astype(float)
    return float(set_sizes.min()), -float((0.5**set_sizes).sum())


def _count_without_complete_run(shortest: dict[int, int], nodes: int, max_lost: int) -> list[int]:
    """Returns the number of choices that lose no set, by lost nodes, if each set is a run of neighbors.

    Choices are counted node by node, by lost nodes and length of the current run of lost nodes. The run must stay
    shorter than the set that ends with it.

    Args:
        shortest: sizes of the sets by last node.
        nodes: total number of nodes.
        max_lost: maximum number of lost nodes.
    """
    longest = max(shortest.values())
    counts = {(0, 0): 1}  # by lost nodes, and length of the current run
    for node in range(nodes):
        limit = shortest.get(node, nodes + 1)
        next_counts: dict[tuple[int, int], int] = {}
        for (lost, run), choices in counts.items():
            next_counts[lost, 0] = next_counts.get((lost, 0), 0) + choices
            if lost < max_lost and run + 1 < limit:
                state = lost + 1, min(run + 1, longest)
                next_counts[state] = next_counts.get(state, 0) + choices
        counts = next_counts
    return [sum(choices for (lost, _), choices in counts.items() if lost == number) for number in range(max_lost + 1)]


def bit_masks(sets: numpy.ndarray) -> list[int]:
    """Returns sets of nodes, bool[sets, nodes], as bit masks."""
    return (sets @ (1 << numpy.arange(sets.shape[1]))).tolist()


def count_contained_sets(sets: Iterable[int], nodes: int) -> numpy.ndarray:
    """Returns, for each choice of lost nodes, the number of sets that it contains, int64[2 ** nodes]."""
    choices = numpy.arange(1 << nodes)
    result = numpy.zeros(len(choices), numpy.int64)
    for mask in sets:
        result += (choices & mask) == mask
    return result


@functools.lru_cache(maxsize=32)
def subset_sizes(nodes: int) -> numpy.ndarray:
    """Returns the number of nodes in each choice, int64[2 ** nodes]."""
    counts = numpy.zeros(1, numpy.int64)
    for _ in range(nodes):
        counts = numpy.concatenate([counts, counts + 1])
    return counts
