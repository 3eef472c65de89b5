"""Chooses between gradients and state: MoEtion's asynchronous optimizer recomputation (section 5.2, Algorithm 3).

An expert is in a *chain* if every snapshot since its last full save has it. Its next state follows from the previous
one by an update with its reduced gradients, a third of the bytes. So a snapshot may have gradients instead, and a
recovery repeats the updates. Pure functions, as :mod:`moc.policy.selection`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from moc.policy.budgets import Sizes
from moc.policy.selection import Counts, Experts, Given, Limit, Place, per_byte, places_of
from moc.state.detail import Detail

Chains = Mapping[Place, tuple[int, int]]
"""By expert, the iterations of its base (the last full save) and of its last save, both inclusive."""

Chosen = Mapping[Place, Detail]
"""Details of the chosen experts."""


def chains_of(bases: Counts, saved_at: Counts) -> dict[Place, tuple[int, int]]:
    """Returns the chains of all experts with a full save.

    Args:
        bases: by layer and expert, the iteration of the last full save; 0 if there is none.
        saved_at: by layer and expert, the iteration of the last save at any detail.
    """
    return {
        (layer, expert): (base, saved_at[layer][expert])
        for layer, row in bases.items()
        for expert, base in enumerate(row)
        if base
    }


def continuing(chains: Chains, iteration: int) -> frozenset[Place]:
    """Returns the experts whose gradients of an iteration suffice: their chains reach the previous iteration."""
    return frozenset(place for place, (_, last) in chains.items() if last == iteration - 1)


def renewed(
    bases: Counts, chained: Collection[Place], iteration: int, max_age: float, limits: Sequence[Limit], given: Given
) -> frozenset[Place]:
    """Returns the chained experts that need a full save, since longer chains take more memory and recovery time.

    Their bases are older than ``max_age`` iterations. The oldest are first, within the limits left by ``given``.
    """
    old = frozenset(place for place in chained if iteration - bases[place[0]][place[1]] > max_age)
    old = old.difference(given.taken)
    if not old:
        return old
    ages = {layer: [iteration - base for base in row] for layer, row in bases.items()}
    first = {layer: [age * ((layer, e) in old) for e, age in enumerate(row)] for layer, row in ages.items()}
    return old.intersection(places_of(per_byte(first, ages, math.inf, limits, given)))


def choose(
    select: Callable[[Given], Experts],
    before: Chosen,
    full: Collection[Place],
    chained: Collection[Place],
    compares: bool = False,
) -> Chosen:
    """Returns the experts of a snapshot, each at its detail.

    Args:
        select: chooses experts within limits.
        before: experts that are chosen already.
        full: experts that are saved in full before others are chosen.
        chained: experts whose gradients suffice.
        compares: chained experts that are saved in full also cost their gradients, which are saved for comparison.
    """
    whole = {place: Detail.FULL for place in full} | dict(before)
    cheaper = frozenset(place for place in chained if whole.get(place) is not Detail.FULL)
    both = frozenset(chained).intersection(whole) - cheaper if compares else frozenset()
    found = places_of(select(Given(whole.keys(), cheaper, both=both)))
    return {place: Detail.GRAD if place in cheaper else Detail.FULL for place in sorted(found)}


def by_cost(
    scores: Mapping[int, Sequence[float]], cheaper: Collection[Place], sizes: Sizes | None = None
) -> dict[int, list[float]]:
    """Returns scores per byte of the save, relative to a full save.

    Args:
        scores: scores by layer and expert.
        cheaper: experts that cost only their gradients.
        sizes: sizes of states and gradients; None if unknown, and then costs are equal.
    """
    ratios = {} if sizes is None else {place: sizes.ratio(place) for place in cheaper}
    return {
        layer: [score * ratios.get((layer, expert), 1.0) for expert, score in enumerate(row)]
        for layer, row in scores.items()
    }
