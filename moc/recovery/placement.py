"""Which nodes keep copies of which node's snapshots, so that as many losses at once as possible are survived.

The placement is Gemini's mixed strategy (SOSP '23; as described in MoEtion, section 2.3): groups of nodes that copy to
each other, and what is left over joins the last group as a ring.  Where all nodes fit into groups, none survives more;
a ring may fall a little short of the best (of 5 nodes with 2 copies each, 5 of the 10 ways to lose three are deadly,
where 4 could do).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import comb


@dataclass(frozen=True)
class Placement:
    """Who keeps what.

    Attributes:
        groups: nodes that stand together, by number. In one of ``replicas + 1`` nodes each keeps what the others have;
            a larger one is a ring, in which each node's snapshots are kept by those that follow it.
        replicas: nodes that keep copies of each node's snapshots, beside itself.
    """

    groups: tuple[tuple[int, ...], ...]
    replicas: int

    @cached_property
    def holders(self) -> dict[int, tuple[int, ...]]:
        """By node, those that keep copies of its snapshots, itself not among them."""
        return {
            node: tuple(group[(place + step) % len(group)] for step in range(1, self.replicas + 1))
            for group in self.groups
            for place, node in enumerate(group)
        }

    def kept_by(self, holder: int) -> tuple[int, ...]:
        """The nodes of whose snapshots one keeps copies, its own not among them."""
        return tuple(node for node in sorted(self.holders) if holder in self.holders[node])


def place(nodes: int, replicas: int) -> Placement:
    """Places copies: groups of ``replicas + 1`` nodes, as many as fit; the last one takes those that are left over.

    Args:
        nodes: of the job, numbered from 0.
        replicas: copies of each node's snapshots on other nodes, from 0 to ``nodes - 1``.

    Raises:
        ValueError: there are not so many nodes.
    """
    if not 0 <= replicas < nodes:
        raise ValueError(f"{nodes} nodes have at most {nodes - 1} others that keep copies, not {replicas}")
    copies = replicas + 1
    starts = [group * copies for group in range(nodes // copies)]
    stops = [*starts[1:], nodes]
    return Placement(tuple(tuple(range(*ends)) for ends in zip(starts, stops, strict=True)), replicas)


def survival(placement: Placement, lost: int) -> float:
    """Probability that any ``lost`` nodes, lost at once, leave at least one that has each node's snapshots.

    Exact: the ways to lose some nodes of a group and survive are the coefficients of a polynomial, and groups are
    independent of each other, so that their product counts the ways to lose nodes of all of them.
    """
    ways = [1]
    for group in placement.groups:
        ways = _product(ways, _survived(len(group), placement.replicas + 1))
    nodes = sum(map(len, placement.groups))
    return ways[lost] / comb(nodes, lost) if lost < len(ways) else 0.0


def _survived(size: int, copies: int) -> list[int]:
    """By number of nodes lost of a ring, the ways that leave a holder of everything; a group is a ring of ``copies``.

    A ring is lost with ``copies`` nodes in a row.  There is one such row at most, since a ring is shorter than two of
    them; so it is counted by where it begins, behind a node that is left, and what else is lost is free.
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
    """One sentence: which nodes stand together, and what they survive.

    Args:
        placement: of copies.
        names: of the nodes, by number.
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
        f"survive the loss at once of any {r} of {nodes} nodes" + "".join(f", {chance}" for chance in chances)
    )
