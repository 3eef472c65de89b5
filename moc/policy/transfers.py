"""Gradients in place of state: MoEtion's asynchronous optimizer recomputation (section 5.2, Algorithm 3).

An expert that every snapshot since a full save of it holds is in a *chain*: its next state follows from the last one
by an update with its reduced gradients, which take a third of the bytes.  So a snapshot may hold these instead, and a
recovery repeats the updates.  Pure functions, as :mod:`moc.policy.selection`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from moc.policy.budgets import Sizes
from moc.policy.selection import Counts, Experts, Given, Limit, Place, per_byte, places_of
from moc.state.detail import Detail

Chains = Mapping[Place, tuple[int, int]]
"""By expert, the iteration of its base, the last full save, and of the last save, both inclusive."""

Chosen = Mapping[Place, Detail]
"""By chosen expert, its detail."""


def chains_of(bases: Counts, saved_at: Counts) -> dict[Place, tuple[int, int]]:
    """The chains of all experts that were ever saved in full.

    Args:
        bases: by layer and expert, the iteration of the last full save; 0 if there is none.
        saved_at: the same of the last save at any detail.
    """
    return {
        (layer, expert): (base, saved_at[layer][expert])
        for layer, row in bases.items()
        for expert, base in enumerate(row)
        if base
    }


def continuing(chains: Chains, iteration: int) -> frozenset[Place]:
    """The experts whose gradients of an iteration suffice: their chains reach the iteration before it."""
    return frozenset(place for place, (_, last) in chains.items() if last == iteration - 1)


def renewed(
    bases: Counts, chained: Collection[Place], iteration: int, max_age: float, limits: Sequence[Limit], given: Given
) -> frozenset[Place]:
    """The chained experts that are saved in full again, since a longer chain takes more memory and time to fold.

    Those are the ones with a base older than ``max_age`` iterations, the oldest first, within what is ``given``.
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
    """The experts of a snapshot, each at its detail.

    Args:
        select: chooses experts within limits.
        before: experts that are chosen already.
        full: experts that are saved in full before any is chosen.
        chained: experts whose gradients suffice.
        compares: of those saved in full nevertheless, they are saved beside.
    """
    whole = {place: Detail.FULL for place in full} | dict(before)
    cheaper = frozenset(place for place in chained if whole.get(place) is not Detail.FULL)
    both = frozenset(chained).intersection(whole) - cheaper if compares else frozenset()
    found = places_of(select(Given(whole.keys(), cheaper, both=both)))
    return {place: Detail.GRAD if place in cheaper else Detail.FULL for place in sorted(found)}


def by_cost(
    scores: Mapping[int, Sequence[float]], cheaper: Collection[Place], sizes: Sizes | None = None
) -> dict[int, list[float]]:
    """Scores by the byte that saving an expert costs, relative to a full save.

    Args:
        scores: by layer and expert.
        cheaper: experts that cost their gradients only.
        sizes: of these; None if unknown, and then all cost the same.
    """
    ratios = {} if sizes is None else {place: sizes.ratio(place) for place in cheaper}
    return {
        layer: [score * ratios.get((layer, expert), 1.0) for expert, score in enumerate(row)]
        for layer, row in scores.items()
    }
