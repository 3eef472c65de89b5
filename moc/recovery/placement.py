"""Placement of copies on nodes, so that as many simultaneous losses as possible are survived.

The placement is Gemini's mixed strategy (SOSP '23; as described in MoEtion, section 2.3): groups of nodes that copy to
each other; leftover nodes join the last group, which becomes a ring.  If all nodes fit into groups, no placement
survives more; a ring may fall a little short of the optimum (of 5 nodes with 2 copies each, 5 of the 10 ways to lose
three nodes are fatal, where 4 is possible).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import comb


@dataclass(frozen=True)
class Placement:
    """Which node keeps copies of which.

    Attributes:
        groups: nodes by number.  In a group of ``replicas + 1`` nodes, each keeps copies of all others; a larger group
            is a ring, in which each node's snapshots are copied to the nodes that follow it.
        replicas: nodes that keep copies of each node's snapshots, beside itself.
    """

    groups: tuple[tuple[int, ...], ...]
    replicas: int

    @cached_property
    def holders(self) -> dict[int, tuple[int, ...]]:
        """By node, the other nodes that keep copies of its snapshots."""
        return {
            node: tuple(group[(place + step) % len(group)] for step in range(1, self.replicas + 1))
            for group in self.groups
            for place, node in enumerate(group)
        }

    def kept_by(self, holder: int) -> tuple[int, ...]:
        """Returns the other nodes of whose snapshots a node keeps copies."""
        return tuple(node for node in sorted(self.holders) if holder in self.holders[node])


def place(nodes: int, replicas: int) -> Placement:
    """Places copies in as many groups of ``replicas + 1`` nodes as fit; the last one takes the leftover nodes.

    Raises:
        ValueError: there are not that many other nodes.
    """
    if not 0 <= replicas < nodes:
        raise ValueError(f"{nodes} nodes have at most {nodes - 1} others that keep copies, not {replicas}")
    copies = replicas + 1
    starts = [group * copies for group in range(nodes // copies)]
    stops = [*starts[1:], nodes]
    return Placement(tuple(tuple(range(*ends)) for ends in zip(starts, stops, strict=True)), replicas)


def survival(placement: Placement, lost: int) -> float:
    """Probability that a simultaneous loss of ``lost`` nodes leaves a holder of each node's snapshots.

    Exact: per group, the numbers of survivable losses by size are the coefficients of a polynomial; groups are
    independent, so the product of their polynomials counts the losses over all of them.
    """
    ways = [1]
    for group in placement.groups:
        ways = _product(ways, _survived(len(group), placement.replicas + 1))
    nodes = sum(map(len, placement.groups))
    return ways[lost] / comb(nodes, lost) if lost < len(ways) else 0.0


def _survived(size: int, copies: int) -> list[int]:
    """By number of nodes lost from a ring, the ways that leave a holder of everything; a group is a ring of ``copies``.

    A loss of ``copies`` nodes in a row is fatal.  A ring is shorter than two such rows, so there is at most one; it is
    counted by its first node, which follows a surviving one, and the other losses are free.
    """
    return [
        comb(size, lost) - (size * comb(size - copies - 1, lost - copies) if lost >= copies else 0)
        for lost in range(size)
    ]


def _product(one: list[int], other: list[int]) -> list[int]:
    product = [0] * (len(one) + len(other) - 1)
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            product[i + j] += a * b
    return product


def describe(placement: Placement, names: list[str]) -> str:
    """Describes the groups and the losses that they survive, in one sentence; names are by number of the node."""
    groups = "; ".join(", ".join(names[node] for node in group) for group in placement.groups)
    r, nodes = placement.replicas, len(names)
    chances = [
        f"of {lost} with probability {survival(placement, lost):.4g}"
        for lost in range(r + 1, nodes)
        if survival(placement, lost)
    ][:3]
    return (
        f"snapshots have {r} cop{'y' if r == 1 else 'ies'} in the memory of other nodes, in groups ({groups}): they "
        f"survive the loss at once of any {r} of {nodes} nodes" + "".join(f", {chance}" for chance in chances)
    )
