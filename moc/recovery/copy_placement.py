"""Places copies of each node's snapshots on other nodes, and chooses the nodes that restore them after a loss.

The placement is Gemini's mixed strategy (SOSP '23; as described in MoEtion, section 2.3). Groups of nodes copy to each
other; leftover nodes join the last group, which becomes a ring. If all nodes fit into groups, no placement survives
more. A ring can be slightly worse than the optimum: with 5 nodes and 2 copies each, 5 of the 10 losses of three nodes
are fatal, and 4 is possible.

The choice of nodes for a group does not affect survival. So nodes with the most identical data are grouped, because
copies within the group need not send it (MoEtion, section 5.1). Algorithm 2 there places copies by worker, without
nodes, and one worker can keep more copies than another. Here every node keeps ``replicas``.

Describes state that is identical on several nodes: data-parallel replicas without ZeRO (MoEtion, section 5.1). Each
node saves the state of its ranks, so that all of them can restart from their node's memory. A node that keeps a copy
of another node's snapshot already has the identical data in its own. So it receives only the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, permutations
from math import comb
from typing import NamedTuple

from moc.errors import UserError
from moc.recovery.inventory import NodeInventory, Summary
from moc.recovery.sources import MEMORY, AvailableCheckpoint, recovery_paths
from moc.state.operators import Detail, Operator

DEFAULT_REPLICAS = 2
"""Other nodes that keep copies without ``--replicas``, where there are as many."""

IdenticalBytes = Mapping[frozenset[int], int]
"""Bytes of data that is identical on all nodes of a set, counted once."""

Groups = tuple[tuple[int, ...], ...]

_ALL_TRIED = 8  # nodes; larger jobs use a greedy search and exchanges
_EXCHANGED = 64  # nodes; larger jobs try no exchanges

StageRedundancy = Mapping[tuple[str, ...], Mapping[str, int]]
"""By nodes with identical state: operators, and bytes of each node's copy."""


@dataclass(frozen=True)
class Placement:
    """Assignment of copies to nodes.

    Attributes:
        groups: nodes by number. In a group of ``replicas + 1`` nodes, each keeps copies of all others. A larger group
            is a ring: each node's snapshots are copied to the nodes that follow it.
        replicas: number of other nodes that keep copies of each node's snapshots.
    """

    groups: Groups
    replicas: int

    @cached_property
    def holders(self) -> dict[int, tuple[int, ...]]:
        """Nodes that keep copies, by the node whose snapshots they copy."""
        return {
            node: tuple(group[(position + step) % len(group)] for step in range(1, self.replicas + 1))
            for group in self.groups
            for position, node in enumerate(group)
        }

    def kept_by(self, holder: int) -> tuple[int, ...]:
        """Returns the other nodes whose snapshots a node keeps copies of."""
        return tuple(node for node in sorted(self.holders) if holder in self.holders[node])


def place_copies(nodes: int, replicas: int, identical: IdenticalBytes | None = None) -> Placement:
    """Places copies in as many groups of ``replicas + 1`` nodes as fit; the last group takes the leftover nodes.

    Groups combine nodes with much identical data; without such data they follow the order of the nodes. For up to eight
    nodes, no other choice and order of groups sends fewer bytes.

    Raises:
        ValueError: there are too few other nodes.
    """
    if not 0 <= replicas < nodes:
        raise ValueError(f"{nodes} nodes have at most {nodes - 1} others that keep copies, not {replicas}")
    useful = {
        nodes_alike: amount
        for nodes_alike, amount in (identical or {}).items()
        if 1 < len(nodes_alike) < nodes and amount
    }
    if not useful or not replicas:
        return Placement(_in_order(range(nodes), replicas), replicas)
    if nodes <= _ALL_TRIED:
        return Placement(max(_all_groups(range(nodes), replicas), key=lambda g: _unsent(g, replicas, useful)), replicas)
    groups = _greedy(nodes, replicas, useful)
    return Placement(_exchanged(groups, replicas, useful) if nodes <= _EXCHANGED else groups, replicas)


def not_sent(placement: Placement, identical: IdenticalBytes) -> int:
    """Returns the bytes of a snapshot's copies that need not be sent, because their holders have identical data."""
    return _unsent(placement.groups, placement.replicas, identical)


def _in_order(nodes: Sequence[int], replicas: int) -> Groups:
    copies = replicas + 1
    starts = [group * copies for group in range(len(nodes) // copies)]
    stops = [*starts[1:], len(nodes)]
    return tuple(tuple(nodes[start:stop]) for start, stop in zip(starts, stops, strict=True))


def _unsent(groups: Iterable[tuple[int, ...]], replicas: int, identical: IdenticalBytes) -> int:
    return sum(_unsent_in(group, replicas, identical) for group in groups)


def _unsent_in(group: tuple[int, ...], replicas: int, identical: IdenticalBytes) -> int:
    """Returns the bytes that copies in one group need not send: data identical on a node and its holders."""
    inside_by_bytes = [(amount, [node in nodes_alike for node in group]) for nodes_alike, amount in identical.items()]
    size = len(group)
    return sum(
        amount * sum(inside[position] and inside[(position + step) % size] for position in range(size))
        for amount, inside in inside_by_bytes
        for step in range(1, replicas + 1)
    )


def _all_groups(nodes: Sequence[int], replicas: int) -> Iterator[Groups]:
    """Yields every choice of groups, the ordered one first; the last group is a ring if nodes are left over."""
    copies = replicas + 1
    ring = copies + len(nodes) % copies
    if ring == copies:
        yield from _partitions(nodes, copies)
        return
    for members in reversed(list(combinations(nodes, ring))):
        remaining = [node for node in nodes if node not in members]
        for ring_order in permutations(members[1:]):
            for groups in _partitions(remaining, copies):
                yield (*groups, (members[0], *ring_order))


def _partitions(nodes: Sequence[int], size: int) -> Iterator[Groups]:
    if not nodes:
        yield ()
        return
    for members in combinations(nodes[1:], size - 1):
        remaining = [node for node in nodes[1:] if node not in members]
        for groups in _partitions(remaining, size):
            yield ((nodes[0], *members), *groups)


def _greedy(nodes: int, replicas: int, identical: IdenticalBytes) -> Groups:
    """Starts each group with the first remaining node, and adds the nodes with the most data in common."""
    remaining, order = dict.fromkeys(range(nodes)), []
    while remaining:
        group = [next(iter(remaining))]
        remaining.pop(group[0])
        while remaining and len(group) <= replicas:
            group.append(_closest(group, remaining, identical))
            remaining.pop(group[-1])
        order += group
    return _in_order(order, replicas)


def _closest(group: Sequence[int], remaining: Collection[int], identical: IdenticalBytes) -> int:
    weights = [
        (nodes_alike, amount * sum(node in nodes_alike for node in group)) for nodes_alike, amount in identical.items()
    ]
    weights = [(nodes_alike, weight) for nodes_alike, weight in weights if weight]
    return max(remaining, key=lambda node: sum(weight for nodes_alike, weight in weights if node in nodes_alike))


def _exchanged(groups: Groups, replicas: int, identical: IdenticalBytes) -> Groups:
    """Exchanges pairs of nodes until no exchange saves bytes."""
    better = True
    while better:
        better = False
        for first, second in combinations([(g, p) for g, group in enumerate(groups) for p in range(len(group))], 2):
            exchanged = [list(group) for group in groups]
            (g, p), (h, q) = first, second
            exchanged[g][p], exchanged[h][q] = groups[h][q], groups[g][p]
            pairs = [(groups[i], tuple(exchanged[i])) for i in {g, h}]
            if sum(_unsent_in(b, replicas, identical) - _unsent_in(a, replicas, identical) for a, b in pairs) > 0:
                groups, better = tuple(map(tuple, exchanged)), True
    return groups


def survival(placement: Placement, lost: int) -> float:
    """Returns the probability that a simultaneous loss of ``lost`` nodes leaves a holder of each node's snapshots.

    The result is exact. For each group, the numbers of survivable losses by size are the coefficients of a polynomial.
    Groups are independent, so the product of their polynomials counts the losses over all groups.
    """
    survivable = [1]
    for group in placement.groups:
        survivable = _product(survivable, _survived(len(group), placement.replicas + 1))
    nodes = sum(map(len, placement.groups))
    return survivable[lost] / comb(nodes, lost) if lost < len(survivable) else 0.0


def _survived(size: int, copies: int) -> list[int]:
    """Returns, by number of nodes lost from a ring, the number of losses that leave a holder of everything.

    A group is a ring of ``copies`` nodes. A loss of ``copies`` consecutive nodes is fatal. A ring is shorter than two
    such runs, so there is at most one. It is counted by its first node, which follows a survivor; the other losses are
    free.
    """
    return [
        comb(size, lost) - (size * comb(size - copies - 1, lost - copies) if lost >= copies else 0)
        for lost in range(size)
    ]


def _product(first: list[int], second: list[int]) -> list[int]:
    product = [0] * (len(first) + len(second) - 1)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            product[i + j] += a * b
    return product


def describe_placement(placement: Placement, names: list[str], unsent: int = 0) -> str:
    """Describes the groups and the losses that they survive, in one sentence.

    Names are by number of the node; ``unsent`` is :func:`not_sent` for a full snapshot.
    """
    groups = "; ".join(", ".join(names[node] for node in group) for group in placement.groups)
    r, nodes = placement.replicas, len(names)
    chances = [
        f"of {lost} with probability {survival(placement, lost):.4g}"
        for lost in range(r + 1, nodes)
        if survival(placement, lost)
    ][:3]
    return (
        f"snapshots have {r} cop{'y' if r == 1 else 'ies'} in the memory of other nodes, in groups ({groups}): they "
        f"survive the simultaneous loss of any {r} of {nodes} nodes"
        + "".join(f", {chance}" for chance in chances)
        + (
            f"; {unsent / 1e9:.3g} GB of a full one are not sent, since these nodes have identical data"
            if unsent
            else ""
        )
    )


@dataclass(frozen=True)
class Redundancy:
    """Identical state on the nodes of a job.

    Attributes:
        copies: by operator, how many nodes save each element, if several do.
        nbytes: by nodes, the bytes that are identical on all of them, counted once.
    """

    copies: Mapping[str, int] = field(default_factory=dict)
    nbytes: Mapping[tuple[str, ...], int] = field(default_factory=dict)


def redundancy(stages: Iterable[StageRedundancy]) -> Redundancy:
    """Combines the reports of the pipeline stages."""
    copies: dict[str, int] = {}
    nbytes: dict[tuple[str, ...], int] = {}
    for stage in stages:
        for nodes, operators in stage.items():
            nbytes[nodes] = nbytes.get(nodes, 0) + sum(operators.values())
            copies |= dict.fromkeys(operators, len(nodes))
    return Redundancy(copies, nbytes)


def validate_replicas(replicas: int | None, nodes: int, min_nodes: int | None = None) -> int:
    """Returns the number of other nodes that keep copies: ``--replicas``, or the default.

    Args:
        replicas: ``--replicas``; None for the default.
        nodes: current number of nodes.
        min_nodes: number of nodes that suffices after losses; None if the job needs all.

    Raises:
        UserError: there are fewer other nodes, or there may be fewer later.
    """
    if replicas is not None and min_nodes is not None and replicas > min_nodes - 1:
        fewer = f"lower it to {min_nodes - 1}, " if min_nodes > 1 else ""
        remaining = f"{min_nodes} node{'s' * (min_nodes != 1)}"
        raise UserError(
            f"--replicas {replicas} needs {replicas + 1} nodes, and --nnodes {min_nodes}:... continues with "
            f"{remaining}. Fix: {fewer}leave it out for {DEFAULT_REPLICAS} or fewer, or raise MIN to {replicas + 1}",
            code="too-many-replicas",
        )
    if replicas is None:
        return min(DEFAULT_REPLICAS, nodes - 1)
    if replicas > nodes - 1:
        raise UserError(
            f"--replicas {replicas} is more than the other nodes that can keep copies, {nodes - 1}. Fix: lower it, or "
            f"leave it out for the default, {DEFAULT_REPLICAS} or fewer",
            code="too-many-replicas",
        )
    return replicas


class Restore(NamedTuple):
    """A part to restore.

    Attributes:
        of: the node that lacks its part.
        held_by: a node that has a copy.
        iteration: of the snapshot.
    """

    of: str
    held_by: str
    iteration: int


def to_restore(
    nodes: Mapping[str, NodeInventory], operators: Sequence[Operator], exact: bool, failed: Container[Restore] = ()
) -> list[Restore]:
    """Returns the parts to restore, so that the newest window that the nodes can complete is complete again.

    A full snapshot is a window of one. Chains of gradients that lead to one iteration are restored, too, and so are
    newer snapshots that can be completed: they belong to the current window. If experts may be older (not ``exact``), a
    copied part is restored if its node lacks some of it in this or a newer state. It is also restored if an operator in
    it needs several nodes' parts.

    Args:
        nodes: inventories by node.
        operators: of the model.
        exact: whether all state must be of one iteration.
        failed: restores that failed.
    """
    snapshots = {
        part.snapshot for node in nodes.values() for parts in (node.own, *node.copies.values()) for part in parts
    }
    parts_of = {
        snapshot: [found_part for name in nodes if (found_part := _find(name, snapshot, nodes, failed)) is not None]
        for snapshot in sorted(snapshots)
    }
    if not exact:
        sizes = {operator.name: operator.parameters for operator in operators}
        restores = [(part, restore) for parts in parts_of.values() for part, restore in parts if restore is not None]
        return [restore for part, restore in restores if _is_useful(part, nodes[restore.of].own, sizes)]
    complete = {
        iteration: parts
        for (iteration, writers, _), parts in parts_of.items()
        if sum(part.files for part, _ in parts) == writers
    }
    checkpoints = [
        AvailableCheckpoint(i, MEMORY, {name: detail for part, _ in parts for name, detail in part.details.items()})
        for i, parts in complete.items()
    ]
    path = next(recovery_paths(checkpoints, operators, exact), None)
    if path is None:
        return []
    oldest = min(found_part.iteration for found_part in path.checkpoints())
    return [restore for i in sorted(complete) if i >= oldest for _, restore in complete[i] if restore is not None]


def _find(
    name: str, snapshot: tuple[int, int, str], nodes: Mapping[str, NodeInventory], failed: Container[Restore]
) -> tuple[Summary, Restore | None] | None:
    """Returns a node's part, and its restore if the node lacks it; None if it is lost.

    The restore is from the holder of the most files, then of the most operators.
    """
    if part := _part(nodes[name].own, snapshot):
        return part, None
    candidates = [
        (part, restore)
        for holder, inventory in nodes.items()
        if (part := _part(inventory.copies.get(name, ()), snapshot))
        and (restore := Restore(name, holder, snapshot[0])) not in failed
    ]
    return max(candidates, key=lambda candidate: (candidate[0].files, len(candidate[0].operators)), default=None)


def _is_useful(part: Summary, own_parts: Sequence[Summary], sizes: Mapping[str, int]) -> bool:
    """Returns whether a copy has state that its node lacks, or part of an operator that other nodes may have only here.

    Gradients do not count as newer state, since they need the base that a copy may have.
    """
    newer = {
        name
        for own_part in own_parts
        for name, detail in own_part.details.items()
        if own_part.iteration == part.iteration or own_part.iteration > part.iteration and detail != Detail.GRAD.value
    }
    return any(name not in newer or part.shares(name, sizes.get(name, 0)) for name in part.operators)


def _part(parts: Iterable[Summary], snapshot: tuple[int, int, str]) -> Summary | None:
    return next((part for part in parts if part.snapshot == snapshot), None)
