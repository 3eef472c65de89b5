"""Selects a snapshot's experts by popularity, within budgets (MoEtion, sections 4.2 and 4.3).

Pure functions of counts that all ranks share, so all ranks make the same choice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

Counts = Mapping[int, Sequence[int]]
"""By layer and expert: tokens, or iterations."""

Place = tuple[int, int]
"""Layer and number of an expert."""

Experts = dict[int, list[int]]
"""Chosen experts by layer, ascending."""


RULES = ("per-byte", "proportional")

SCORES = ("tokens", "tokens-age")


@dataclass(frozen=True, eq=False)
class Limit:
    """One limit on a snapshot: bytes of each rank or node, or a number of experts.

    Attributes:
        room: capacity of each bin, such as bytes by rank; at least 0.
        cost: cost of each expert in each bin.
        gradients: cost of an expert's gradients in place of its state, where known.
    """

    room: Mapping[int, float]
    cost: Mapping[Place, Mapping[int, float]]
    gradients: Mapping[Place, Mapping[int, float]] = field(default_factory=dict)

    def total(self, given: Given | None = None) -> int:
        """Returns S_total, the number of experts of mean cost that fit in all bins together (section 4.3)."""
        return self._total if given is None else self._fitting(given)

    def costs_of(self, place: Place, cheaper: bool) -> Mapping[int, float]:
        """Returns the cost of an expert, or of its gradients, in each bin."""
        return self.gradients.get(place, self.cost[place]) if cheaper else self.cost[place]

    @cached_property
    def _total(self) -> int:
        return self._fitting(Given())

    def _fitting(self, given: Given) -> int:
        whole = sum(sum(self.costs_of(place, place in given.cheaper).values()) for place in self.cost)
        mean = whole / max(1, len(self.cost))
        return math.floor(given.share * sum(self.room.values()) / mean + 1e-9) if mean else len(self.cost)


@dataclass(frozen=True)
class Given:
    """Constraints set before experts are chosen.

    Attributes:
        taken: experts that are chosen already, and count even if they do not fit.
        cheaper: experts that cost only their gradients.
        share: share of each limit that experts may take.
        both: experts among ``taken`` that cost their state and their gradients.
    """

    taken: Collection[Place] = ()
    cheaper: Collection[Place] = ()
    share: float = 1.0
    both: Collection[Place] = ()


_NOTHING = Given()


def number_of_experts(places: Iterable[Place], number: int) -> Limit:
    """Returns the limit of a fixed number of experts, over all layers."""
    return Limit({0: number}, {place: {0: 1} for place in places})


@dataclass(frozen=True)
class _Groups:
    """Groups of experts with equal costs: if one does not fit, none of its group does.

    Attributes:
        room: capacity of each bin, over all limits.
        costs: costs of an expert of a group, by bin.
        rows: group of each expert, by layer.
        cheaper: group of each expert's gradients, by layer.
    """

    room: list[float]
    costs: list[tuple[tuple[int, float], ...]]
    rows: dict[int, list[int]]
    cheaper: dict[int, list[int]]


@lru_cache(maxsize=16)  # limits stay the same for many snapshots
def _groups(limits: tuple[Limit, ...]) -> _Groups:
    bins = {at: number for number, at in enumerate((of, key) for of, one in enumerate(limits) for key in one.room)}
    found: dict[tuple[tuple[int, float], ...], int] = {}
    tables: tuple[dict[int, list[int]], ...] = {}, {}
    for place in sorted(limits[0].cost):
        for cheaper, rows in enumerate(tables):
            of_each = (one.costs_of(place, bool(cheaper)).items() for one in limits)
            costs = tuple((bins[of, key], cost) for of, items in enumerate(of_each) for key, cost in items)
            rows.setdefault(place[0], []).append(found.setdefault(costs, len(found)))
    return _Groups([room for limit in limits for room in limit.room.values()], list(found), *tables)


class _Rooms:
    """Remaining capacity while experts are chosen.

    Attributes:
        rows: group of each expert, by layer.
    """

    def __init__(self, limits: Sequence[Limit], given: Given, share: float = 1.0):
        self._groups = known = _groups(tuple(limits))
        self._room = [given.share * room for room in known.room]
        self._left = [share * room for room in self._room]
        self.rows = {layer: list(row) for layer, row in known.rows.items()} if given.cheaper else known.rows
        for layer, expert in given.cheaper:
            self.rows[layer][expert] = known.cheaper[layer][expert]
        for layer, expert in given.taken:
            self._subtract(self.rows[layer][expert])
        for layer, expert in given.both:
            self._subtract(known.cheaper[layer][expert])

    def take(self, group: int) -> bool:
        """Takes an expert of a group if it fits, and returns whether it does."""
        left = self._left
        for key, cost in self._groups.costs[group]:
            if left[key] < cost:
                return False
        self._subtract(group)
        return True

    def _subtract(self, group: int) -> None:
        for key, cost in self._groups.costs[group]:
            self._left[key] -= cost

    def fill(self, order: Iterable[int], groups: Sequence[int], taken: bytearray) -> None:
        """Takes and marks the experts that fit, in order; stops when no group has room."""
        waiting = set(groups)
        for place in order:
            if taken[place] or (group := groups[place]) not in waiting:
                continue
            if self.take(group):
                taken[place] = True
                continue
            waiting.remove(group)
            if not waiting:
                return

    def give(self, rest: float) -> None:
        """Adds a share of the limits."""
        self._left = [left + rest * room for left, room in zip(self._left, self._room, strict=True)]


def allocate(unsaved: Counts, total: int) -> dict[int, int]:
    """Returns S[l] of Algorithm 1: S_total experts, over layers in proportion to their tokens at risk.

    The paper "adjusts" the rounded-down shares to sum to S_total, without details. Here the largest remainders are
    rounded up, with ties to the lower layer. A layer saves at most all its experts; other layers receive its excess. If
    no tokens are at risk, layers share equally.

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


def proportional(unsaved: Counts, limits: Sequence[Limit], given: Given = _NOTHING) -> Experts:
    """Returns the S[l] experts of each layer with the most tokens since their last save (Algorithm 1).

    S_total is for all bins together, so the experts of a busy rank may exceed its own budget: these are skipped.

    Args:
        unsaved: P, tokens of each expert since it was last saved.
        limits: the budget; S_total is the smallest of theirs.
        given: constraints set before.
    """
    rooms, chosen = _Rooms(limits, given), {}
    for layer, number in allocate(unsaved, min(limit.total(given) for limit in limits)).items():
        taken = {expert for at, expert in given.taken if at == layer}
        others = (expert for expert in _descending(unsaved[layer]) if expert not in taken)
        fitting = (expert for expert in others if rooms.take(rooms.rows[layer][expert]))
        chosen[layer] = sorted([*taken, *itertools.islice(fitting, max(0, number - len(taken)))])
    return chosen


def places_of(experts: Experts) -> list[Place]:
    """Returns the chosen experts of all layers."""
    return [(layer, expert) for layer, row in experts.items() for expert in row]


def _descending(row: Sequence[float]) -> list[int]:
    return sorted(range(len(row)), key=row.__getitem__, reverse=True)  # ties: the lower number


def per_byte(
    scores: Mapping[int, Sequence[float]],
    ages: Counts,
    max_age: float,
    limits: Sequence[Limit],
    given: Given = _NOTHING,
) -> Experts:
    """Returns the experts of all layers with the highest scores that fit; too old experts are first.

    Args:
        scores: score per byte of the save, by layer and expert.
        ages: iterations since each expert was last saved.
        max_age: experts older than this are first, the oldest before others, on at most half of the limits.
        limits: the budget.
        given: constraints set before.
    """
    rooms = _Rooms(limits, given, 0.5)
    groups, age = _flat(rooms.rows, scores), _flat(ages, scores)
    starts = dict(zip(scores, itertools.accumulate(map(len, scores.values()), initial=0), strict=False))
    taken = bytearray(len(groups))
    for layer, expert in given.taken:
        taken[starts[layer] + expert] = True
    old = [place for place in range(len(age)) if age[place] > max_age]
    rooms.fill(sorted(old, key=age.__getitem__, reverse=True), groups, taken)
    rooms.give(0.5)
    rooms.fill(_descending(_flat(scores, scores)), groups, taken)
    marks = iter(taken)
    return {layer: list(itertools.compress(range(len(row)), marks)) for layer, row in scores.items()}


def _flat[Number: (int, float)](table: Mapping[int, Sequence[Number]], layers: Iterable[int]) -> list[Number]:
    return list(itertools.chain.from_iterable(table[layer] for layer in layers))


def scores(unsaved: Counts, ages: Counts, kind: str) -> dict[int, list[float]]:
    """Returns the scores of experts: tokens since their last save, or these times the iterations since then.

    An expert with rate r, saved every n iterations, has r (n - 1) / 2 tokens at risk on average. With S saves in each
    iteration, the sum over experts is least for n proportional to r to the power -1/2. Tokens times age tends to this
    optimum. Tokens without age, as in Algorithm 1, tend to n proportional to 1/r.

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


def steady_risk(rates: Iterable[float], number: float, always: float = 1.0) -> float:
    """Returns the tokens at risk right after a snapshot under constant popularity, for the best intervals.

    The result is the minimal sum of r (n - 1) / 2 over experts, with 1/n summing to ``number`` and no n below 1. The
    busiest experts are saved in every snapshot, and n is proportional to r to the power -1/2 for the others.

    Args:
        rates: tokens of each expert per snapshot.
        number: experts in a snapshot; with gradients, the number of states with its bytes.
        always: cost of an expert in every snapshot, in states: less than 1 if its gradients suffice.

    Returns:
        Tokens; infinite if nothing is saved and any expert receives tokens.
    """
    roots = sorted((math.sqrt(rate) for rate in rates if rate > 0), reverse=True)
    if number >= always * len(roots):
        return 0.0
    rest, squares, least = sum(roots), sum(root * root for root in roots), math.inf
    for busiest, root in enumerate(roots):
        if number <= always * busiest:
            break
        scale = rest / (number - always * busiest)  # n = scale / root
        if scale >= root:
            least = min(least, (scale * rest - squares) / 2)
        rest, squares = rest - root, squares - root * root
    return least


def lost_by_layer(unsaved: Counts, each: Mapping[int, float]) -> list[float]:
    """Returns the momentary lost tokens of each layer that receives tokens, in iterations.

    Args:
        unsaved: tokens of each expert since it was last saved.
        each: tokens of an iteration by layer, over all its experts.
    """
    return [sum(row) / each[layer] for layer, row in unsaved.items() if each[layer] > 0]
