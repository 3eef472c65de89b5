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
        gradients: cost of an expert's gradients in each bin, where known. Otherwise gradients in place of a state cost
            as much as it does, and gradients in addition to a state cost nothing: the expert counts once.
    """

    capacity: Mapping[int, float]
    costs: Mapping[ExpertId, Mapping[int, float]]
    gradients: Mapping[ExpertId, Mapping[int, float]] = field(default_factory=dict)

    def expert_count(self, preselection: Preselection | None = None) -> int:
        """Returns S_total, the number of experts of mean cost that fit in all bins together (section 4.3)."""
        return self._expert_count if preselection is None else self._count_fitting(preselection)

    def cost_by_bin(self, expert_id: ExpertId, gradients_only: bool) -> Mapping[int, float]:
        """Returns the cost of an expert, or of its gradients, in each bin."""
        return self.gradients.get(expert_id, self.costs[expert_id]) if gradients_only else self.costs[expert_id]

    def comparison_cost_by_bin(self, expert_id: ExpertId) -> Mapping[int, float]:
        """Returns the cost of an expert's gradients in each bin, if its state is chosen, too."""
        return self.gradients.get(expert_id, {})

    @cached_property
    def _expert_count(self) -> int:
        return self._count_fitting(Preselection())

    def _count_fitting(self, preselection: Preselection) -> int:
        total = sum(
            sum(self.cost_by_bin(expert_id, expert_id in preselection.gradients_only).values())
            for expert_id in self.costs
        )
        mean = total / max(1, len(self.costs))
        return math.floor(preselection.share * sum(self.capacity.values()) / mean + 1e-9) if mean else len(self.costs)


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


def count_limit(expert_ids: Iterable[ExpertId], number: int) -> Limit:
    """Returns the limit of a fixed number of experts, over all layers."""
    return Limit({0: number}, {expert_id: {0: 1} for expert_id in expert_ids})


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
    bins = {
        at: number for number, at in enumerate((of, key) for of, limit in enumerate(limits) for key in limit.capacity)
    }
    group_of_costs: dict[tuple[tuple[int, float], ...], int] = {}
    tables: tuple[dict[int, list[int]], ...] = {}, {}, {}
    for expert_id in sorted(limits[0].costs):
        each = [
            [limit.cost_by_bin(expert_id, gradients_only=False) for limit in limits],
            [limit.cost_by_bin(expert_id, gradients_only=True) for limit in limits],
            [limit.comparison_cost_by_bin(expert_id) for limit in limits],
        ]
        for of_each, rows in zip(each, tables, strict=True):
            costs = tuple((bins[of, key], cost) for of, by_bin in enumerate(of_each) for key, cost in by_bin.items())
            rows.setdefault(expert_id[0], []).append(group_of_costs.setdefault(costs, len(group_of_costs)))
    return _Groups(
        [capacity for limit in limits for capacity in limit.capacity.values()], list(group_of_costs), *tables
    )


class _RemainingCapacity:
    """Remaining capacity while experts are chosen.

    Attributes:
        rows: group of each expert, by layer.
    """

    def __init__(self, limits: Sequence[Limit], preselection: Preselection, share: float = 1.0):
        self._groups = groups = _groups(tuple(limits))
        self._capacity = [preselection.share * capacity for capacity in groups.capacity]
        self._remaining = [share * capacity for capacity in self._capacity]
        self.rows = (
            {layer: list(row) for layer, row in groups.rows.items()} if preselection.gradients_only else groups.rows
        )
        for layer, expert in preselection.gradients_only:
            self.rows[layer][expert] = groups.gradient_rows[layer][expert]
        for layer, expert in preselection.chosen:
            self._subtract(self.rows[layer][expert])
        for layer, expert in preselection.state_and_gradients:
            self._subtract(groups.comparison_rows[layer][expert])

    def take_if_fits(self, group: int) -> bool:
        """Takes an expert of a group if it fits, and returns whether it does."""
        remaining = self._remaining
        for key, cost in self._groups.costs[group]:
            if remaining[key] < cost:
                return False
        self._subtract(group)
        return True

    def _subtract(self, group: int) -> None:
        for key, cost in self._groups.costs[group]:
            self._remaining[key] -= cost

    def take_in_order(self, order: Iterable[int], groups: Sequence[int], taken: bytearray) -> None:
        """Takes and marks the experts that fit, in order; stops when no group has room."""
        waiting = set(groups)
        for index in order:
            if taken[index] or (group := groups[index]) not in waiting:
                continue
            if self.take_if_fits(group):
                taken[index] = True
                continue
            waiting.remove(group)
            if not waiting:
                return

    def add_share(self, share: float) -> None:
        """Adds a share of the limits."""
        self._remaining = [
            remaining + share * capacity for remaining, capacity in zip(self._remaining, self._capacity, strict=True)
        ]


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
    while (unallocated := expert_count - sum(allocated.values())) > 0:
        open_ = [layer for layer in unsaved if allocated[layer] < len(unsaved[layer])]
        risk = {layer: sum(unsaved[layer]) for layer in open_}
        if not any(risk.values()):
            risk = dict.fromkeys(open_, 1)
        total_risk = sum(risk.values())
        shares = {layer: divmod(risk[layer] * unallocated, total_risk) for layer in open_}
        for layer, (share, _) in shares.items():
            allocated[layer] = min(len(unsaved[layer]), allocated[layer] + share)
        remainder = expert_count - sum(allocated.values())
        by_remainder = sorted(open_, key=lambda layer: (-shares[layer][1], layer))
        for layer in [layer for layer in by_remainder if allocated[layer] < len(unsaved[layer])][:remainder]:
            allocated[layer] += 1
    return allocated


def proportional(
    unsaved: CountsByLayer, limits: Sequence[Limit], preselection: Preselection = _NO_PRESELECTION
) -> ExpertsByLayer:
    """Returns the S[l] experts of each layer with the most tokens since their last save (Algorithm 1).

    S_total is for all bins together, so the experts of a busy rank may exceed its own budget: these are skipped.

    Args:
        unsaved: P, tokens of each expert since it was last saved.
        limits: the budget; S_total is the smallest of theirs.
        preselection: constraints set before.
    """
    remaining, chosen = _RemainingCapacity(limits, preselection), {}
    for layer, number in allocate_experts(unsaved, min(limit.expert_count(preselection) for limit in limits)).items():
        taken = {expert for at, expert in preselection.chosen if at == layer}
        unchosen = (expert for expert in _indices_descending(unsaved[layer]) if expert not in taken)
        fitting = (expert for expert in unchosen if remaining.take_if_fits(remaining.rows[layer][expert]))
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
    preselection: Preselection = _NO_PRESELECTION,
) -> ExpertsByLayer:
    """Returns the experts of all layers with the highest scores that fit; too old experts are first.

    Args:
        scores: score per byte of the save, by layer and expert.
        ages: iterations since each expert was last saved.
        max_age: experts older than this are first, the oldest before others, on at most half of the limits.
        limits: the budget.
        preselection: constraints set before.
    """
    remaining = _RemainingCapacity(limits, preselection, 0.5)
    groups, age = _concatenate(remaining.rows, scores), _concatenate(ages, scores)
    starts = dict(zip(scores, itertools.accumulate(map(len, scores.values()), initial=0), strict=False))
    taken = bytearray(len(groups))
    for layer, expert in preselection.chosen:
        taken[starts[layer] + expert] = True
    old = [index for index in range(len(age)) if age[index] > max_age]
    remaining.take_in_order(sorted(old, key=age.__getitem__, reverse=True), groups, taken)
    remaining.add_share(0.5)
    remaining.take_in_order(_indices_descending(_concatenate(scores, scores)), groups, taken)
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
    root_sum, square_sum, least = sum(roots), sum(root * root for root in roots), math.inf
    for busiest, root in enumerate(roots):
        if number <= always * busiest:
            break
        scale = root_sum / (number - always * busiest)  # n = scale / root
        if scale >= root:
            least = min(least, (scale * root_sum - square_sum) / 2)
        root_sum, square_sum = root_sum - root, square_sum - root * root
    return least


def lost_tokens_by_layer(unsaved: CountsByLayer, each: Mapping[int, float]) -> list[float]:
    """Returns the momentary lost tokens of each layer that receives tokens, in iterations.

    Args:
        unsaved: tokens of each expert since it was last saved.
        each: tokens of an iteration by layer, over all its experts.
    """
    return [sum(row) / each[layer] for layer, row in unsaved.items() if each[layer] > 0]


@dataclass(frozen=True, eq=False)
class ExpertSizes:
    """Bytes of snapshots.

    Attributes:
        dense: bytes of all dense operators, by rank.
        experts: bytes of each expert, by the ranks that save it.
        nodes: node of each rank.
        replicas: nodes that receive a copy of each node's snapshot; 0 without peers.
        gradients: bytes of each expert's gradients, by the ranks that save them; empty if none are saved.
    """

    dense: Mapping[int, int]
    experts: Mapping[ExpertId, Mapping[int, int]]
    nodes: tuple[int, ...] = ()
    replicas: int = 0
    gradients: Mapping[ExpertId, Mapping[int, int]] = field(default_factory=dict)

    def total_limit(self, nbytes: float) -> Limit:
        """Returns the limit of the bytes of all experts in a snapshot, over all ranks."""
        return _total_limit(self, nbytes)

    @cached_property
    def largest_expert(self) -> int:
        """Bytes of the largest expert, over all ranks."""
        return max((sum(ranks.values()) for ranks in self.experts.values()), default=0)

    def gradient_ratio(self, expert_id: ExpertId) -> float:
        """Returns the bytes of an expert's state relative to its gradients."""
        return sum(self.experts[expert_id].values()) / sum(self.gradients[expert_id].values())

    def rank_limit(self, budget: float) -> Limit:
        """Returns the limit of each rank's bytes, after subtracting dense operators.

        Replicas save complete experts in turn, so a rank may save up to one more than its mean share. Room for one
        expert is reserved.
        """
        return _rank_limit(self, budget)

    def node_limit(self, received: float) -> Limit:
        """Returns the limit of each node's received bytes; every node keeps copies for ``replicas`` others."""
        return _node_limit(self, received)

    @cached_property
    def least_rank_bytes(self) -> int:
        """The smallest budget of a rank that leaves every rank room for an expert."""
        return max((self.dense.get(rank, 0) + largest for rank, (largest, _) in self._largest.items()), default=0)

    @cached_property
    def full_bytes_by_rank(self) -> dict[int, int]:
        """Bytes of each rank in a full snapshot."""
        bytes_by_rank = dict(self.dense)
        for ranks in self.experts.values():
            for rank, amount in ranks.items():
                bytes_by_rank[rank] = bytes_by_rank.get(rank, 0) + amount
        return bytes_by_rank

    @cached_property
    def busiest_rank(self) -> tuple[int, int]:
        """The rank with the most bytes of dense operators and its largest expert, and its bytes of that expert."""
        largest: dict[int, int] = {}
        for ranks in self.experts.values():
            for rank, amount in ranks.items():
                largest[rank] = max(largest.get(rank, 0), amount)
        rank = max(largest, key=lambda rank: self.dense.get(rank, 0) + largest[rank])
        return rank, largest[rank]

    @cached_property
    def least_node_bytes(self) -> int:
        """The smallest budget of a node, in bytes received, that leaves every node room for an expert."""
        largest = max((amount for nodes in self._experts_by_node.values() for amount in nodes.values()), default=0)
        return max(1, self.replicas) * (max(self._dense_by_node.values(), default=0) + largest)

    @cached_property
    def _largest(self) -> dict[int, tuple[int, int]]:
        """Bytes of the largest expert of each rank, and the number of ranks that save it."""
        largest: dict[int, tuple[int, int]] = {}
        for ranks in self.experts.values():
            for rank in ranks:
                largest[rank] = max(largest.get(rank, (0, 1)), (sum(ranks.values()), len(ranks)))
        return largest

    @cached_property
    def _experts_by_node(self) -> dict[ExpertId, dict[int, int]]:
        return {expert_id: self._sum_by_node(ranks) for expert_id, ranks in self.experts.items()}

    @cached_property
    def _dense_by_node(self) -> dict[int, int]:
        return dict.fromkeys(self.nodes, 0) | self._sum_by_node(self.dense)

    def _sum_by_node(self, ranks: Mapping[int, int]) -> dict[int, int]:
        bytes_by_node: dict[int, int] = {}
        for rank, amount in ranks.items():
            bytes_by_node[self.nodes[rank]] = bytes_by_node.get(self.nodes[rank], 0) + amount
        return bytes_by_node


@lru_cache(maxsize=8)
def _total_limit(sizes: ExpertSizes, nbytes: float) -> Limit:
    states, gradients = (
        {expert_id: {0: sum(ranks.values())} for expert_id, ranks in of.items()}
        for of in (sizes.experts, sizes.gradients)
    )
    return Limit({0: nbytes}, states, gradients)


@lru_cache(maxsize=8)  # budgets stay the same for many snapshots
def _rank_limit(sizes: ExpertSizes, budget: float) -> Limit:
    capacity = {
        rank: budget - sizes.dense.get(rank, 0) - largest * (1 - 1 / ranks)
        for rank, (largest, ranks) in sizes._largest.items()
    }
    return Limit(_nonnegative(capacity), sizes.experts, sizes.gradients)


@lru_cache(maxsize=8)
def _node_limit(sizes: ExpertSizes, received: float) -> Limit:
    sent = received / max(1, sizes.replicas)
    capacity = {node: sent - dense for node, dense in sizes._dense_by_node.items()}
    gradients = {expert_id: sizes._sum_by_node(ranks) for expert_id, ranks in sizes.gradients.items()}
    return Limit(_nonnegative(capacity), sizes._experts_by_node, gradients)


def count_fitting(numbers: Mapping[int, int], limits: Sequence[Limit]) -> int:
    """Returns how many equally popular experts fit: at most S_total, since ranks cannot share their room."""
    ages = {layer: [0] * number for layer, number in numbers.items()}
    return sum(map(len, per_byte(ages, ages, 0, limits).values()))


def _nonnegative(capacity: Mapping[int, float]) -> dict[int, float]:
    return {key: max(0.0, nbytes) for key, nbytes in capacity.items()}
