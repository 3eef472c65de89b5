"""Chooses the snapshots to restore to nodes that lost their memory, and the parts that other nodes take over.

Chooses the nodes that provide absent nodes' parts of snapshots, when a job resumes with other nodes. A snapshot in
memory is complete only with the parts of all nodes that wrote it. For each absent node, one node with copies *adopts*
its parts. Each node then fetches the operators that its ranks load.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from moc.recovery.inventory import Summary
from moc.recovery.sources import MEMORY, AvailableCheckpoint, recoveries
from moc.state.operators import Detail, Operator


class NodeInventory(NamedTuple):
    """Contents of a node's memory: its own parts, and by node the copies of other nodes' parts."""

    own: Sequence[Summary]
    copies: Mapping[str, Sequence[Summary]]


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
    nodes: Mapping[str, NodeInventory], operators: Sequence[Operator], exact: bool, spoilt: Container[Restore] = ()
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
        spoilt: restores that failed.
    """
    there = {part.snapshot for node in nodes.values() for parts in (node.own, *node.copies.values()) for part in parts}
    found = {
        snapshot: [one for name in nodes if (one := _find(name, snapshot, nodes, spoilt)) is not None]
        for snapshot in sorted(there)
    }
    if not exact:
        sizes = {operator.name: operator.parameters for operator in operators}
        restores = [(part, restore) for parts in found.values() for part, restore in parts if restore is not None]
        return [restore for part, restore in restores if _is_of_use(part, nodes[restore.of].own, sizes)]
    whole = {
        iteration: parts
        for (iteration, writers, _), parts in found.items()
        if sum(part.files for part, _ in parts) == writers
    }
    held = [
        AvailableCheckpoint(i, MEMORY, {name: detail for part, _ in parts for name, detail in part.details.items()})
        for i, parts in whole.items()
    ]
    way = next(recoveries(held, operators, exact), None)
    if way is None:
        return []
    first = min(one.iteration for one in way.used())
    return [restore for i in sorted(whole) if i >= first for _, restore in whole[i] if restore is not None]


def _find(
    name: str, snapshot: tuple[int, int, str], nodes: Mapping[str, NodeInventory], spoilt: Container[Restore]
) -> tuple[Summary, Restore | None] | None:
    """Returns a node's part, and its restore if the node lacks it; None if it is lost.

    The restore is from the holder of the most files, then of the most operators.
    """
    if part := _part(nodes[name].own, snapshot):
        return part, None
    found = [
        (part, restore)
        for holder, inventory in nodes.items()
        if (part := _part(inventory.copies.get(name, ()), snapshot))
        and (restore := Restore(name, holder, snapshot[0])) not in spoilt
    ]
    return max(found, key=lambda one: (one[0].files, len(one[0].operators)), default=None)


def _is_of_use(part: Summary, own: Sequence[Summary], sizes: Mapping[str, int]) -> bool:
    """Returns whether a copy has state that its node lacks, or part of an operator that other nodes may have only here.

    Gradients do not count as newer state, since they need the base that a copy may have.
    """
    newer = {
        name
        for one in own
        for name, detail in one.details.items()
        if one.iteration == part.iteration or one.iteration > part.iteration and detail != Detail.GRAD.value
    }
    return any(name not in newer or part.shares(name, sizes.get(name, 0)) for name in part.operators)


def _part(parts: Iterable[Summary], snapshot: tuple[int, int, str]) -> Summary | None:
    return next((part for part in parts if part.snapshot == snapshot), None)


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
