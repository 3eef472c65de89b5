"""Selects a snapshot's experts by popularity, within budgets (MoEtion, sections 4.2 and 4.3).

Pure functions of counts that all ranks share, so all ranks make the same choice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

CountsByLayer = Mapping[int, Sequence[int]]
"""By layer and expert: tokens, or iterations."""

ExpertId = tuple[int, int]
"""Layer and number of an expert."""

ExpertsByLayer = dict[int, list[int]]
"""Chosen experts by layer, ascending."""


RULES = ("per-byte", "proportional")

SCORES = ("tokens", "tokens-age")


@dataclass(frozen=True, eq=False)
class Limit:
    """One limit on a snapshot: bytes of each rank or node, or a number of experts.

    Attributes:
        capacity: capacity of each bin, such as bytes by rank; at least 0.
        costs: cost of each expert in each bin.
        gradients: cost of an expert's gradients in each bin, where known. Otherwise gradients in place of a state have
            its cost, and gradients in addition to a state cost nothing: the expert counts once.
    """

    capacity: Mapping[int, float]
    costs: Mapping[ExpertId, Mapping[int, float]]
    gradients: Mapping[ExpertId, Mapping[int, float]] = field(default_factory=dict)

    def expert_count(self, given: Preselection | None = None) -> int:
        """Returns S_total, the number of experts of mean cost that fit in all bins together (section 4.3)."""
        return self._expert_count if given is None else self._count_fitting(given)

    def cost_by_bin(self, place: ExpertId, gradients_only: bool) -> Mapping[int, float]:
        """Returns the cost of an expert, or of its gradients, in each bin."""
        return self.gradients.get(place, self.costs[place]) if gradients_only else self.costs[place]

    def comparison_cost_by_bin(self, place: ExpertId) -> Mapping[int, float]:
        """Returns the cost of an expert's gradients in each bin, if its state is chosen, too."""
        return self.gradients.get(place, {})

    @cached_property
    def _expert_count(self) -> int:
        return self._count_fitting(Preselection())

    def _count_fitting(self, given: Preselection) -> int:
        whole = sum(sum(self.cost_by_bin(place, place in given.gradients_only).values()) for place in self.costs)
        mean = whole / max(1, len(self.costs))
        return math.floor(given.share * sum(self.capacity.values()) / mean + 1e-9) if mean else len(self.costs)


@dataclass(frozen=True)
class Preselection:
    """Constraints set before experts are chosen.

    Attributes:
        chosen: experts that are chosen already, and count even if they do not fit.
        gradients_only: experts that cost only their gradients.
        share: share of each limit that experts may take.
        state_and_gradients: experts among ``chosen`` that cost their state and their gradients.
    """

    chosen: Collection[ExpertId] = ()
    gradients_only: Collection[ExpertId] = ()
    share: float = 1.0
    state_and_gradients: Collection[ExpertId] = ()


_NO_PRESELECTION = Preselection()


def count_limit(places: Iterable[ExpertId], number: int) -> Limit:
    """Returns the limit of a fixed number of experts, over all layers."""
    return Limit({0: number}, {place: {0: 1} for place in places})


@dataclass(frozen=True)
class _Groups:
    """Groups of experts with equal costs: if one does not fit, none of its group does.

    Attributes:
        capacity: capacity of each bin, over all limits.
        costs: costs of an expert of a group, by bin.
        rows: group of each expert, by layer.
        gradient_rows: group of each expert's gradients, by layer.
        comparison_rows: as ``gradient_rows``, for gradients in addition to the state.
    """

    capacity: list[float]
    costs: list[tuple[tuple[int, float], ...]]
    rows: dict[int, list[int]]
    gradient_rows: dict[int, list[int]]
    comparison_rows: dict[int, list[int]]


@lru_cache(maxsize=16)  # limits stay the same for many snapshots
def _groups(limits: tuple[Limit, ...]) -> _Groups:
    bins = {at: number for number, at in enumerate((of, key) for of, one in enumerate(limits) for key in one.capacity)}
    group_of_costs: dict[tuple[tuple[int, float], ...], int] = {}
    tables: tuple[dict[int, list[int]], ...] = {}, {}, {}
    for place in sorted(limits[0].costs):
        each = [
            [one.cost_by_bin(place, gradients_only=False) for one in limits],
            [one.cost_by_bin(place, gradients_only=True) for one in limits],
            [one.comparison_cost_by_bin(place) for one in limits],
        ]
        for of_each, rows in zip(each, tables, strict=True):
            costs = tuple((bins[of, key], cost) for of, by_bin in enumerate(of_each) for key, cost in by_bin.items())
            rows.setdefault(place[0], []).append(group_of_costs.setdefault(costs, len(group_of_costs)))
    return _Groups([room for limit in limits for room in limit.capacity.values()], list(group_of_costs), *tables)


class _RemainingCapacity:
    """Remaining capacity while experts are chosen.

    Attributes:
        rows: group of each expert, by layer.
    """

    def __init__(self, limits: Sequence[Limit], given: Preselection, share: float = 1.0):
        self._groups = known = _groups(tuple(limits))
        self._capacity = [given.share * room for room in known.capacity]
        self._remaining = [share * room for room in self._capacity]
        self.rows = {layer: list(row) for layer, row in known.rows.items()} if given.gradients_only else known.rows
        for layer, expert in given.gradients_only:
            self.rows[layer][expert] = known.gradient_rows[layer][expert]
        for layer, expert in given.chosen:
            self._subtract(self.rows[layer][expert])
        for layer, expert in given.state_and_gradients:
            self._subtract(known.comparison_rows[layer][expert])

    def take_if_fits(self, group: int) -> bool:
        """Takes an expert of a group if it fits, and returns whether it does."""
        left = self._remaining
        for key, cost in self._groups.costs[group]:
            if left[key] < cost:
                return False
        self._subtract(group)
        return True

    def _subtract(self, group: int) -> None:
        for key, cost in self._groups.costs[group]:
            self._remaining[key] -= cost

    def take_in_order(self, order: Iterable[int], groups: Sequence[int], taken: bytearray) -> None:
        """Takes and marks the experts that fit, in order; stops when no group has room."""
        waiting = set(groups)
        for place in order:
            if taken[place] or (group := groups[place]) not in waiting:
                continue
            if self.take_if_fits(group):
                taken[place] = True
                continue
            waiting.remove(group)
            if not waiting:
                return

    def add_share(self, rest: float) -> None:
        """Adds a share of the limits."""
        self._remaining = [left + rest * room for left, room in zip(self._remaining, self._capacity, strict=True)]


def allocate_experts(unsaved: CountsByLayer, expert_count: int) -> dict[int, int]:
    """Returns S[l] of Algorithm 1: S_total experts, over layers in proportion to their tokens at risk.

    The paper "adjusts" the rounded-down shares to sum to S_total, without details. Here the largest remainders are
    rounded up, with ties to the lower layer. A layer saves at most all its experts; other layers receive its excess. If
    no tokens are at risk, layers share equally.

    Args:
        unsaved: P, tokens of each expert since it was last saved.
        expert_count: S_total.

    Returns:
        Number of experts by layer; their sum is S_total, or the number of all experts if that is smaller.
    """
    allocated = dict.fromkeys(unsaved, 0)
    expert_count = min(expert_count, sum(map(len, unsaved.values())))
    while (rest := expert_count - sum(allocated.values())) > 0:
        open_ = [layer for layer in unsaved if allocated[layer] < len(unsaved[layer])]
        risk = {layer: sum(unsaved[layer]) for layer in open_}
        if not any(risk.values()):
            risk = dict.fromkeys(open_, 1)
        whole = sum(risk.values())
        shares = {layer: divmod(risk[layer] * rest, whole) for layer in open_}
        for layer, (share, _) in shares.items():
            allocated[layer] = min(len(unsaved[layer]), allocated[layer] + share)
        left = expert_count - sum(allocated.values())
        by_remainder = sorted(open_, key=lambda layer: (-shares[layer][1], layer))
        for layer in [layer for layer in by_remainder if allocated[layer] < len(unsaved[layer])][:left]:
            allocated[layer] += 1
    return allocated


def proportional(
    unsaved: CountsByLayer, limits: Sequence[Limit], given: Preselection = _NO_PRESELECTION
) -> ExpertsByLayer:
    """Returns the S[l] experts of each layer with the most tokens since their last save (Algorithm 1).

    S_total is for all bins together, so the experts of a busy rank may exceed its own budget: these are skipped.

    Args:
        unsaved: P, tokens of each expert since it was last saved.
        limits: the budget; S_total is the smallest of theirs.
        given: constraints set before.
    """
    rooms, chosen = _RemainingCapacity(limits, given), {}
    for layer, number in allocate_experts(unsaved, min(limit.expert_count(given) for limit in limits)).items():
        taken = {expert for at, expert in given.chosen if at == layer}
        others = (expert for expert in _indices_descending(unsaved[layer]) if expert not in taken)
        fitting = (expert for expert in others if rooms.take_if_fits(rooms.rows[layer][expert]))
        chosen[layer] = sorted([*taken, *itertools.islice(fitting, max(0, number - len(taken)))])
    return chosen


def expert_ids(experts: ExpertsByLayer) -> list[ExpertId]:
    """Returns the chosen experts of all layers."""
    return [(layer, expert) for layer, row in experts.items() for expert in row]


def _indices_descending(row: Sequence[float]) -> list[int]:
    return sorted(range(len(row)), key=row.__getitem__, reverse=True)  # ties: the lower number


def per_byte(
    scores: Mapping[int, Sequence[float]],
    ages: CountsByLayer,
    max_age: float,
    limits: Sequence[Limit],
    given: Preselection = _NO_PRESELECTION,
) -> ExpertsByLayer:
    """Returns the experts of all layers with the highest scores that fit; too old experts are first.

    Args:
        scores: score per byte of the save, by layer and expert.
        ages: iterations since each expert was last saved.
        max_age: experts older than this are first, the oldest before others, on at most half of the limits.
        limits: the budget.
        given: constraints set before.
    """
    rooms = _RemainingCapacity(limits, given, 0.5)
    groups, age = _concatenate(rooms.rows, scores), _concatenate(ages, scores)
    starts = dict(zip(scores, itertools.accumulate(map(len, scores.values()), initial=0), strict=False))
    taken = bytearray(len(groups))
    for layer, expert in given.chosen:
        taken[starts[layer] + expert] = True
    old = [place for place in range(len(age)) if age[place] > max_age]
    rooms.take_in_order(sorted(old, key=age.__getitem__, reverse=True), groups, taken)
    rooms.add_share(0.5)
    rooms.take_in_order(_indices_descending(_concatenate(scores, scores)), groups, taken)
    marks = iter(taken)
    return {layer: list(itertools.compress(range(len(row)), marks)) for layer, row in scores.items()}


def _concatenate[Number: (int, float)](table: Mapping[int, Sequence[Number]], layers: Iterable[int]) -> list[Number]:
    return list(itertools.chain.from_iterable(table[layer] for layer in layers))


def scores(unsaved: CountsByLayer, ages: CountsByLayer, kind: str) -> dict[int, list[float]]:
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


def lost_tokens_by_layer(unsaved: CountsByLayer, each: Mapping[int, float]) -> list[float]:
    """Returns the momentary lost tokens of each layer that receives tokens, in iterations.

    Args:
        unsaved: tokens of each expert since it was last saved.
        each: tokens of an iteration by layer, over all its experts.
    """
    return [sum(row) / each[layer] for layer, row in unsaved.items() if each[layer] > 0]
