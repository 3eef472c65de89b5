"""Places the replicas of a layer's experts on nodes (Lazarus, section 4.1 and appendix A.1).

Maximum rank overlap (MRO): experts form groups of the size of a node's slots, fewest replicas first. Each node with a
group's first expert, its representative, has the complete group. So all experts survive if all representatives do.

No placement survives more losses of any number of nodes if the nodes suffice for all representatives. Theorem 1 omits
this condition, and fails without it: the last group then has fewer nodes than its experts have replicas. Here, the last
groups are spread over the remaining nodes, with the number of groups that survives most. Up to ten nodes, exchanges of
two replicas follow while they increase survival.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence

import numpy

from moc.elastic import ElasticError
from moc.elastic.allocation import allocate_distinct, experts_by_load, feasible_replicas, max_experts_everywhere
from moc.elastic.dispatch import tokens_per_rank
from moc.elastic.objective import TOLERATED_IMBALANCE, LossModel, predicted_time
from moc.elastic.survival import bit_masks, subset_sizes, survival_score

EMPTY = -1
"""Marks a slot without an expert."""


def place_by_load(
    loads: Sequence[int], nodes: int, slots: int, min_replicas: int, everywhere: int = 0, same_groups: bool = False
) -> numpy.ndarray:
    """Places the replicas of each expert according to its load.

    Experts with equally many replicas are ordered by number, so that small load changes keep the order.  If the busiest
    node then has more than 1.05 times the mean work, they form groups of level load (:func:`level_groups`), which
    survive equally.

    Args:
        loads: tokens of each expert.
        nodes: nodes that hold replicas.
        slots: slots of each node.
        min_replicas: replicas of each expert, or of as many as possible (:func:`allocate_distinct`).
        everywhere: number of hottest experts on every node.
        same_groups: form the same groups for any number of nodes. Experts with equally many replicas are then ordered
            by load, since their replicas may differ for another number of nodes.

    Returns:
        Experts by node and slot, int64[nodes, slots], each at most once per node; :data:`EMPTY` if the node has all.

    Raises:
        ValueError: the slots do not suffice.
    """
    return _place_by_load(tuple(loads), nodes, slots, min_replicas, everywhere, same_groups)[0].copy()


@functools.lru_cache(maxsize=256)  # the search for h places each layer, and the last placement is used
def _place_by_load(
    loads: tuple[int, ...], nodes: int, slots: int, min_replicas: int, everywhere: int, same_groups: bool
) -> tuple[numpy.ndarray, float]:
    """Returns the placement of :func:`place_by_load`, and its imbalance."""
    coldest_first = experts_by_load(loads)
    feasible_replicas(1, len(loads) - everywhere, nodes, slots - everywhere)  # raises
    replicas = allocate_distinct(loads, nodes, slots, min(min_replicas, nodes), everywhere)
    hottest = coldest_first[len(loads) - everywhere :]

    def placed(order: Sequence[int]) -> numpy.ndarray:
        numbers = numpy.array([*order, EMPTY])  # EMPTY (-1) is the last index
        position = {expert: index for index, expert in enumerate(order)}
        table = place_replicas(
            [replicas[expert] for expert in order], nodes, slots, [position[expert] for expert in hottest]
        )
        return without_repetition(numbers[table], coldest_first[::-1])

    table = placed(coldest_first if same_groups else range(len(loads)))
    imbalance = placement_imbalance(loads, table)
    if same_groups or imbalance <= TOLERATED_IMBALANCE:
        return table, imbalance
    leveled = placed(level_groups(loads, replicas, slots - everywhere, hottest))
    return min((table, imbalance), (leveled, placement_imbalance(loads, leveled)), key=lambda candidate: candidate[1])


def level_groups(
    loads: Sequence[int], replicas: Sequence[int], slots: int, everywhere: Sequence[int] = ()
) -> list[int]:
    """Returns the experts in an order that levels the load of groups; experts with equally many replicas are exchanged.

    MRO groups the experts by ascending replicas, and leaves open which of those with equally many share a group.  The
    hottest one goes to the group with the least load that has room (longest processing time first).  The time grows as
    E log E for E experts.

    Args:
        loads: tokens of each expert.
        replicas: replicas of each expert.
        slots: experts of a group.
        everywhere: experts that belong to no group.
    """
    ungrouped = set(everywhere)
    grouped = sorted((expert for expert in range(len(loads)) if expert not in ungrouped), key=replicas.__getitem__)
    result, load_of_group = [], [0.0] * (-(-len(grouped) // max(slots, 1)) + 1)
    for count, run in itertools.groupby(grouped, key=replicas.__getitem__):
        members, start = list(run), len(result)
        stop = start + len(members)
        groups = range(start // slots, (stop - 1) // slots + 1)
        capacity = {group: min(stop, (group + 1) * slots) - max(start, group * slots) for group in groups}
        heap = [(load_of_group[group], group) for group in groups]
        heapq.heapify(heap)
        chosen: dict[int, list[int]] = {group: [] for group in groups}
        for expert in sorted(members, key=lambda expert: -loads[expert]):
            load, group = heapq.heappop(heap)
            chosen[group].append(expert)
            load_of_group[group] = load + loads[expert] / max(count, 1)
            if len(chosen[group]) < capacity[group]:
                heapq.heappush(heap, (load_of_group[group], group))
        result += [expert for group in groups for expert in sorted(chosen[group])]
    return result + list(everywhere)


def choose_everywhere(
    loads: Sequence[Sequence[int]],
    nodes: int,
    slots: int,
    min_replicas: int,
    same_groups: bool = False,
    losses: LossModel = LossModel(),  # noqa: B008  # frozen
) -> int:
    """Returns the number of hottest experts on every node with the least predicted time to train.

    Maximum rank overlap puts cold experts on the same few nodes, which have little work. Each slot for a hot expert
    there creates more groups of cold experts, and so lowers survival.

    Args:
        loads: tokens of each expert, by layer.
        nodes: nodes that hold replicas.
        slots: slots of each node.
        min_replicas: replicas of each expert; fewer experts with them are not accepted for a larger number.
        same_groups: as in :func:`place_by_load`.
        losses: how nodes are lost.

    Returns:
        The number.  If the busiest node has at most 1.05 times the mean work, it is the smallest such number, since
        survival only falls.

    Raises:
        ValueError: the slots do not suffice for all experts.
    """
    experts, times = len(loads[0]), []
    for count in range(min(max_experts_everywhere(min_replicas, experts, nodes, slots), experts - 1) + 1):
        placements = [_place_by_load(tuple(row), nodes, slots, min_replicas, count, same_groups) for row in loads]
        imbalance = float(numpy.mean([imbalance for _, imbalance in placements]))
        if imbalance <= TOLERATED_IMBALANCE:
            return count
        representatives = [
            sorted(allocate_distinct(row, nodes, slots, min(min_replicas, nodes), count))[: experts - count]
            for row in loads
        ]
        firsts = numpy.min(representatives, axis=0)[:: slots - count].tolist() if slots > count else []
        times.append(predicted_time(imbalance, firsts, nodes, losses))
    return int(numpy.argmin(times))


def placement_imbalance(loads: Sequence[int], table: numpy.ndarray) -> float:
    """Returns the work of the busiest node divided by the mean, as balanced by the dispatcher."""
    tokens = numpy.asarray(loads, numpy.int64)
    work = tokens_per_rank(tokens, replicas_by_node(table, len(tokens)))
    return float(work.max() / work.mean()) if tokens.any() else 1.0


def place_replicas(replicas: Sequence[int], nodes: int, slots: int, everywhere: Sequence[int] = ()) -> numpy.ndarray:
    """Places replicas so that a replica of each expert survives the most simultaneous node losses.

    Args:
        replicas: replicas of each expert, at most ``nodes * slots`` in total.
        nodes: nodes that hold them.
        slots: slots of each node.
        everywhere: experts that every node has, in its first slots; the others use the remaining slots.

    Returns:
        Experts by node and slot, int64[nodes, slots], or :data:`EMPTY`. A node may have several replicas of an expert
        if the others are full: they are weights of the dispatcher (:func:`without_repetition`).

    Raises:
        ValueError: the replicas do not fit.
    """
    if sum(replicas) > nodes * slots:
        raise ElasticError(
            f"{sum(replicas)} replicas do not fit on {nodes} nodes of {slots} slots. Fix: raise the slots per node, or "
            "lower the replicas",
            code="slots-too-few",
        )
    other_experts = [expert for expert in experts_by_load(replicas) if expert not in everywhere]
    table = numpy.full((nodes, slots), EMPTY, numpy.int64)
    table[:, : len(everywhere)] = everywhere
    if other_experts:
        placed = _best_placement(tuple(replicas[expert] for expert in other_experts), nodes, slots - len(everywhere))
        table[:, len(everywhere) :] = numpy.where(placed == EMPTY, EMPTY, numpy.array(other_experts)[placed])
    return table


def without_repetition(table: numpy.ndarray, hottest_first: Sequence[int]) -> numpy.ndarray:
    """Returns the placement with each expert once per node; other experts get the repeated and empty slots.

    A second replica of an expert on a node would duplicate its weights. Another expert survives more losses, and can
    take load off other nodes.

    Args:
        table: a table from :func:`place_replicas`.
        hottest_first: all experts, in the order of getting slots.
    """
    nodes, slots = table.shape
    is_stored = replicas_by_node(table, len(hottest_first)) > 0
    result = _remove_repetitions(table)
    used = (result != EMPTY).sum(axis=1)
    for expert in hottest_first:
        nodes_without = numpy.flatnonzero((used < slots) & ~is_stored[expert])
        result[nodes_without, used[nodes_without]] = expert
        used[nodes_without] += 1
    return result


def _remove_repetitions(table: numpy.ndarray) -> numpy.ndarray:
    """Returns each node's experts without repetition, followed by its empty slots."""
    result = numpy.full_like(table, EMPTY)
    used, node_indices = numpy.zeros(len(table), numpy.int64), numpy.arange(len(table))
    for slot in range(table.shape[1]):
        expert = table[:, slot]
        new_nodes = node_indices[(expert != EMPTY) & ~(result == expert[:, None]).any(axis=1)]
        result[new_nodes, used[new_nodes]] = expert[new_nodes]
        used[new_nodes] += 1
    return result


def replicas_by_node(table: numpy.ndarray, experts: int) -> numpy.ndarray:
    """Returns the replicas of each expert on each node, int16[experts, nodes], from experts by node and slot."""
    nodes, slots = table.shape
    replicas = numpy.zeros((experts + 1, nodes), numpy.int16)  # last row: empty slots
    for slot in range(slots):
        replicas[table[:, slot], numpy.arange(nodes)] += 1
    return replicas[:experts]


def representative_counts(replicas: Sequence[int], slots: int) -> list[int]:
    """Returns the replicas of the first expert of each group, ascending."""
    return sorted(replicas)[::slots]


def place_spread(replicas: Sequence[int], nodes: int, slots: int) -> numpy.ndarray:
    """Returns the placement "spread" of section 6.3: replicas are dealt to the nodes in turn."""
    return _deal_in_turn(numpy.repeat(numpy.arange(len(replicas)), replicas), nodes, slots)


def place_compact(replicas: Sequence[int], nodes: int, slots: int) -> numpy.ndarray:
    """Returns the placement "compact" of section 6.3: nodes are filled one after the other."""
    row = numpy.repeat(numpy.arange(len(replicas)), replicas)
    return numpy.append(row, numpy.full(nodes * slots - len(row), EMPTY)).reshape(nodes, slots)


def place_overlapping(replicas: Sequence[int], nodes: int, slots: int, groups: int | None = None) -> numpy.ndarray:
    """Returns the MRO placement of the first groups; other replicas are spread over the remaining nodes.

    Args:
        replicas: replicas of each expert, ascending.
        nodes: nodes that hold them.
        slots: slots of each node.
        groups: number of groups placed by MRO; all by default.
    """
    table = numpy.full((nodes, slots), EMPTY, numpy.int64)
    remaining, start = numpy.array(replicas), 0
    firsts = range(0, len(replicas), slots)[: groups if groups is not None else len(replicas)]
    for first in firsts:
        group = numpy.arange(first, min(first + slots, len(replicas)))
        stop = min(start + int(replicas[first]), nodes)
        table[start:stop, : len(group)] = group
        remaining[group] -= stop - start
        start = stop
    _fill_free_slots(table, remaining, start)
    return table


@functools.lru_cache(maxsize=64)  # the search for h repeats placements
def _best_placement(replicas: tuple[int, ...], nodes: int, slots: int) -> numpy.ndarray:
    """Returns the best placement found for replicas in ascending order."""
    best = place_overlapping(replicas, nodes, slots)
    if sum(representative_counts(replicas, slots)) <= nodes:
        return best
    experts = len(replicas)
    best_scored = best, survival_score(replicas_by_node(best, experts))
    for table in _candidate_placements(replicas, nodes, slots):
        candidate_score = survival_score(replicas_by_node(table, experts))
        if candidate_score > best_scored[1]:
            best_scored = table, candidate_score
    return improve_by_exchanges(best_scored[0], experts) if nodes <= MAX_SEARCHED_NODES else best_scored[0]


def _candidate_placements(replicas: Sequence[int], nodes: int, slots: int) -> Iterator[numpy.ndarray]:
    groups = -(-len(replicas) // slots)
    for spread in sorted({2, 3, 4, groups}):
        if spread <= groups:
            yield place_overlapping(replicas, nodes, slots, groups - spread)


def _fill_free_slots(table: numpy.ndarray, remaining: numpy.ndarray, start: int) -> None:
    """Puts the remaining replicas into free slots, slot by slot, so that few nodes get an expert twice.

    Experts of the last group, which has free slots on its own nodes, are first: they go to the nodes from ``start`` on,
    which hold none of them.
    """
    nodes, slots = table.shape
    row = numpy.repeat(numpy.arange(len(remaining))[::-1], remaining[::-1])
    free = numpy.arange(nodes)
    free = numpy.concatenate([free[start:], free[:start]])
    node, slot = (axis.ravel() for axis in numpy.meshgrid(free, numpy.arange(slots)))
    vacant = numpy.flatnonzero(table[node, slot] == EMPTY)[: len(row)]
    table[node[vacant], slot[vacant]] = row


def _deal_in_turn(replicas: numpy.ndarray, nodes: int, slots: int) -> numpy.ndarray:
    filled = numpy.append(replicas, numpy.full(nodes * slots - len(replicas), EMPTY))
    return numpy.ascontiguousarray(filled.reshape(slots, nodes).T)


MAX_SEARCHED_NODES = 10
"""With more nodes, trying all pairs takes too long."""


def improve_by_exchanges(table: numpy.ndarray, experts: int) -> numpy.ndarray:
    """Returns a placement of the same replicas that no exchange of two improves.

    Args:
        table: experts by node and slot, int64[nodes, slots], negative for empty slots.
        experts: total number of experts.
    """
    search = _ExchangeSearch(table, experts)
    while sum(search.exchange_best(*pair) for pair in itertools.combinations(range(len(table)), 2)):
        pass
    return search.table


class _ExchangeSearch:
    """A placement that is improved in place, and for each expert the choices of lost nodes that lose it."""

    def __init__(self, table: numpy.ndarray, experts: int):
        self.table = table.copy()
        nodes = len(table)
        size = subset_sizes(nodes)
        self._choices = numpy.argsort(size, kind="stable")  # choices of lost nodes, fewest first
        self._starts = numpy.searchsorted(size[self._choices], numpy.arange(nodes + 1))
        self._replicas = numpy.zeros((experts + 1, nodes), numpy.int64)  # last row: empty slots
        numpy.add.at(self._replicas, (table, numpy.arange(nodes)[:, None]), 1)
        self._losing = self._losing_choices(numpy.arange(experts + 1), self._replicas)
        self._lost_experts = self._losing.sum(axis=0, dtype=numpy.int16)
        self._best = self._survived_choices(self._lost_experts)[0]

    def exchange_best(self, first: int, second: int) -> bool:
        """Makes the best exchange between two nodes, and returns True, if it survives more losses."""
        first_experts, second_experts = self.table[first], self.table[second]
        losing_first, losing_second = (
            self._losing_after_move(first_experts, first, second),
            self._losing_after_move(second_experts, second, first),
        )
        lost_experts = (
            self._lost_experts
            + (losing_first - self._losing[first_experts])[:, None]
            + (losing_second - self._losing[second_experts])[None, :]
        )
        lost_experts[first_experts[:, None] == second_experts[None, :]] = self._lost_experts
        survived = self._survived_choices(lost_experts.reshape(-1, lost_experts.shape[-1]))
        best = max(range(len(survived)), key=survived.__getitem__)
        if survived[best] <= self._best:
            return False
        first_slot, second_slot = divmod(best, len(second_experts))
        x, y = int(first_experts[first_slot]), int(second_experts[second_slot])
        self._best, self._lost_experts = survived[best], lost_experts[first_slot, second_slot].copy()
        self._losing[x], self._losing[y] = losing_first[first_slot], losing_second[second_slot]
        self._replicas[[x, y], [first, second]] -= 1
        self._replicas[[x, y], [second, first]] += 1
        self.table[first, first_slot], self.table[second, second_slot] = y, x
        return True

    def _losing_after_move(self, experts: numpy.ndarray, source: int, target: int) -> numpy.ndarray:
        """Returns the choices that lose each of a node's experts after one of its replicas has moved."""
        replicas = self._replicas[experts]
        replicas[:, source] -= 1
        replicas[:, target] += 1
        return self._losing_choices(experts, replicas)

    def _losing_choices(self, experts: numpy.ndarray, replicas: numpy.ndarray) -> numpy.ndarray:
        mask = numpy.array(bit_masks(replicas > 0))[:, None]
        losing = (self._choices & mask) == mask
        losing[(experts < 0) | (experts == len(self._replicas) - 1)] = False  # an empty slot is never lost
        return losing.astype(numpy.int16)

    def _survived_choices(self, lost_experts: numpy.ndarray) -> list[list[int]]:
        """Returns the choices without a lost expert, by number of lost nodes, for each row."""
        return numpy.add.reduceat(numpy.atleast_2d(lost_experts) == 0, self._starts, axis=1, dtype=numpy.int64).tolist()
