"""Enumerates all choices of lost nodes as bit masks, for few nodes; bit i is node i."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy


def masks(sets: numpy.ndarray) -> list[int]:
    """Returns sets of nodes, bool[sets, nodes], as bit masks."""
    return (sets @ (1 << numpy.arange(sets.shape[1]))).tolist()


def deaths(sets: Iterable[int], nodes: int) -> numpy.ndarray:
    """Returns, for each choice of lost nodes, the number of sets that it contains, int64[2 ** nodes]."""
    choices = numpy.arange(1 << nodes)
    result = numpy.zeros(len(choices), numpy.int64)
    for mask in sets:
        result += (choices & mask) == mask
    return result


def survived(dead: numpy.ndarray, nodes: int) -> list[int]:
    """Returns, by number of lost nodes, the number of choices for which ``dead`` is 0."""
    return numpy.bincount(sizes(nodes)[dead == 0], minlength=nodes + 1).tolist()


@functools.lru_cache(maxsize=32)
def sizes(nodes: int) -> numpy.ndarray:
    """Returns the number of nodes in each choice, int64[2 ** nodes]."""
    sizes = numpy.zeros(1, numpy.int64)
    for _ in range(nodes):
        sizes = numpy.concatenate([sizes, sizes + 1])
    return sizes
