"""Chooses the nodes that provide absent nodes' parts of snapshots, when a job resumes with other nodes.

A snapshot in memory is complete only with the parts of all nodes that wrote it. For each absent node, one node with
copies *adopts* its parts. Each node then fetches the operators that its ranks load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from moc.recovery.inventory import Summary
from moc.recovery.lost_nodes import NodeInventory


class Fetch(NamedTuple):
    """Operators to fetch, each with its detail, from the node that has this part of a snapshot."""

    iteration: int
    of: str
    held_by: str
    operators: Mapping[str, str]


def adopters(nodes: Mapping[str, NodeInventory]) -> dict[str, str]:
    """Returns, by absent node, the present node that adopts its parts: one with the newest copy."""
    holders: dict[str, list[str]] = {}
    for node in sorted(nodes):
        for of, parts in nodes[node].copies.items():
            if of not in nodes and parts:
                holders.setdefault(of, []).append(node)
    return {of: max(there, key=lambda node: _newest(nodes[node].copies[of])) for of, there in holders.items()}


def to_fetch(
    node: str, wanted: Mapping[int, Collection[str]], nodes: Mapping[str, NodeInventory], sizes: Mapping[str, int]
) -> list[Fetch]:
    """Returns the fetches of a node for its ranks, in a fixed order.

    An operator with identical copies on several nodes is fetched from one that has all of it, unless it is local.

    Args:
        node: name of the node.
        wanted: by iteration of a snapshot, the operators that the node's ranks load.
        nodes: inventories of all nodes.
        sizes: by operator, its number of parameters.
    """
    adopted = adopters(nodes)
    parts = {of: (of, nodes[of].own) for of in nodes}
    parts |= {of: (holder, nodes[holder].copies[of]) for of, holder in adopted.items()}
    here = {of for of, (holder, _) in parts.items() if holder == node}
    fetches: list[Fetch] = []
    for iteration, names in sorted(wanted.items()):
        of_it = {of: part for of, (_, own) in parts.items() for part in own if part.iteration == iteration}
        whole: set[str] = set()  # operators with identical copies
        for of in sorted(of_it, key=lambda of: (of not in here, of)):
            part, operators = of_it[of], {}
            for name in sorted(part.details.keys() & names):
                if name not in part.alike:
                    operators[name] = part.details[name]
                elif name not in whole and part.has_all(name, sizes[name]):
                    whole.add(name)
                    operators[name] = part.details[name]
            if operators and of not in here:
                fetches.append(Fetch(iteration, of, parts[of][0], operators))
    return fetches


def _newest(parts: Iterable[Summary]) -> int:
    return max(part.iteration for part in parts)
