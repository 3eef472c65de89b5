"""Selection of the experts of a snapshot by popularity, within budgets (MoEtion, sections 4.2 and 4.3).

Pure functions of counts that all ranks share, so all ranks choose alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

Counts = Mapping[int, Sequence[int]]
"""By layer and expert: tokens, or iterations."""

Place = tuple[int, int]
"""Layer and number of an expert."""

Experts = dict[int, list[int]]
"""Chosen experts by layer, ascending."""

RULES = ("per-byte", "proportional")

SCORES = ("tokens", "tokens-age")


@dataclass(frozen=True)
class Limit:
    """One limit on a snapshot: bytes of each rank or node, or a number of experts.

    Attributes:
        room: what each bin takes, such as bytes by rank; at least 0.
        cost: by expert, what it takes of each bin.
    """

    room: Mapping[int, float]
    cost: Mapping[Place, Mapping[int, float]]

    def total(self) -> int:
        """S_total, the number of experts of mean cost that fit in all bins together (section 4.3)."""
        mean = sum(sum(bins.values()) for bins in self.cost.values()) / max(1, len(self.cost))
        return math.floor(sum(self.room.values()) / mean + 1e-9) if mean else len(self.cost)


def number_of_experts(places: Iterable[Place], number: int) -> Limit:
    """The limit of a fixed number of experts, over all layers."""
    return Limit({0: number}, {place: {0: 1} for place in places})


class _Rooms:
    """What is left of limits while experts are chosen; some are ``taken`` before, whether they fit or not."""

    def __init__(self, limits: Sequence[Limit], taken: Iterable[Place], share: float = 1.0):
        self._limits = limits
        self._left = [{key: share * room for key, room in limit.room.items()} for limit in limits]
        for place in taken:
            self._subtract(place)

    def take(self, place: Place) -> bool:
        """Takes an expert if it fits."""
        costs = [limit.cost[place] for limit in self._limits]
        if any(left[key] < cost for left, bins in zip(self._left, costs, strict=True) for key, cost in bins.items()):
            return False
        self._subtract(place)
        return True

    def _subtract(self, place: Place) -> None:
        for left, limit in zip(self._left, self._limits, strict=True):
            for key, cost in limit.cost[place].items():
                left[key] -= cost

    def give(self, rest: float) -> None:
        """Adds a share of the limits."""
        for left, limit in zip(self._left, self._limits, strict=True):
            for key, room in limit.room.items():
                left[key] += rest * room


def allocate(unsaved: Counts, total: int) -> dict[int, int]:
    """S[l] of Algorithm 1: S_total experts over layers in proportion to the tokens at risk of each.

    The paper "adjusts" the rounded-down shares to sum to S_total without saying how: here the largest remainders are
    rounded up, ties to the lower layer; a layer saves at most all its experts, and what it leaves goes to the others.
    If no tokens are at risk, layers share equally.

    Args:
        unsaved: P, tokens of each expert since it was last saved.
        total: S_total.

    Returns:
        Number of experts by layer; their sum is S_total, or the number of all experts if that is smaller.
    """
    given = dict.fromkeys(unsaved, 0)
    total = min(total, sum(map(len, unsaved.values())))
    while (rest := total - sum(given.values())) > 0:
        open_ = [layer for layer in unsaved if given[layer] < len(unsaved[layer])]
        risk = {layer: sum(unsaved[layer]) for layer in open_}
        if not any(risk.values()):
            risk = dict.fromkeys(open_, 1)
        whole = sum(risk.values())
        shares = {layer: divmod(risk[layer] * rest, whole) for layer in open_}
        for layer, (share, _) in shares.items():
            given[layer] = min(len(unsaved[layer]), given[layer] + share)
        left = total - sum(given.values())
        by_remainder = sorted(open_, key=lambda layer: (-shares[layer][1], layer))
        for layer in [layer for layer in by_remainder if given[layer] < len(unsaved[layer])][:left]:
            given[layer] += 1
    return given


def proportional(unsaved: Counts, limits: Sequence[Limit], taken: Collection[Place] = ()) -> Experts:
    """Algorithm 1: the S[l] experts of each layer with the most tokens since they were last saved.

    S_total counts all bytes of the budget alike, so the chosen experts of a busy rank may exceed its own: such experts
    are passed over.

    Args:
        unsaved: P, tokens of each expert since it was last saved.
        limits: the budget; S_total is the smallest of theirs.
        taken: experts that are chosen already, and count.
    """
    rooms, chosen = _Rooms(limits, taken), {}
    for layer, number in allocate(unsaved, min(limit.total() for limit in limits)).items():
        given = [expert for one, expert in taken if one == layer]
        others = (expert for expert in _descending(unsaved[layer]) if expert not in given)
        fitting = (expert for expert in others if rooms.take((layer, expert)))
        chosen[layer] = sorted([*given, *itertools.islice(fitting, max(0, number - len(given)))])
    return chosen


def _descending(row: Sequence[int]) -> list[int]:
    return sorted(range(len(row)), key=lambda expert: (-row[expert], expert))


def per_byte(
    scores: Mapping[int, Sequence[float]],
    ages: Counts,
    max_age: float,
    limits: Sequence[Limit],
    taken: Collection[Place] = (),
) -> Experts:
    """The experts with the highest scores that fit, of all layers together; the oldest first where they are too old.

    Args:
        scores: by layer and expert, per byte that saving it costs.
        ages: iterations since each expert was last saved.
        max_age: experts older than this come first, oldest first, on at most half of the limits.
        limits: the budget.
        taken: experts that are chosen already, and count.
    """
    places = [(layer, expert) for layer, row in scores.items() for expert in range(len(row))]
    open_ = [place for place in places if place not in taken]
    old = sorted((place for place in open_ if _at(ages, place) > max_age), key=lambda place: -_at(ages, place))
    rooms = _Rooms(limits, taken, 0.5)
    chosen = {*taken, *(place for place in old if rooms.take(place))}
    rooms.give(0.5)
    # ties: model order
    waiting = sorted((place for place in places if place not in chosen), key=lambda place: -_at(scores, place))
    chosen |= {place for place in waiting if rooms.take(place)}
    return {layer: [expert for expert in range(len(row)) if (layer, expert) in chosen] for layer, row in scores.items()}


def _at(table: Mapping[int, Sequence[float]], place: Place) -> float:
    return table[place[0]][place[1]]


def scores(unsaved: Counts, ages: Counts, kind: str) -> dict[int, list[float]]:
    """The scores of experts: tokens since they were last saved, or these times the iterations since then.

    An expert with rate r saved every n iterations has r (n - 1) / 2 tokens at risk on average.  Under the constraint
    that S are saved in each iteration, the sum over experts is least for n proportional to r to the power -1/2, which
    is where tokens times age tends to; tokens alone, as in Algorithm 1, tend to n proportional to 1/r.

    Args:
        unsaved: tokens of each expert since it was last saved.
        ages: iterations since then.
        kind: ``tokens`` or ``tokens-age``.
    """
    if kind == "tokens":
        return {layer: list(map(float, row)) for layer, row in unsaved.items()}
    return {
        layer: [float(tokens * (age + 1)) for tokens, age in zip(row, ages[layer], strict=True)]
        for layer, row in unsaved.items()
    }


def steady_risk(rates: Iterable[float], number: float) -> float:
    """Tokens at risk right after a snapshot if popularity stays as it is, for the best intervals of each expert.

    The minimum of the sum of r (n - 1) / 2 over experts, with 1/n summing to the number saved and no n below 1: the
    busiest experts are saved in every snapshot, and n is proportional to r to the power -1/2 for the others.

    Args:
        rates: tokens of each expert per snapshot.
        number: experts in a snapshot.

    Returns:
        Tokens; infinite if nothing is saved and any expert receives tokens.
    """
    roots = sorted((math.sqrt(rate) for rate in rates if rate > 0), reverse=True)
    if number >= len(roots):
        return 0.0
    rest = sum(roots)
    for always, root in enumerate(roots):
        if number <= always:
            break
        scale = rest / (number - always)  # n = scale / root
        if scale >= root:
            return sum(one * (scale - one) for one in roots[always:]) / 2
        rest -= root
    return math.inf
