"""Chooses the snapshots that other nodes' memory restores to nodes that have lost theirs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from moc.recovery.sources import MEMORY, AvailableCheckpoint, recoveries
from moc.state.operators import Operator


class NodePart(NamedTuple):
    """A node's part of a snapshot.

    Attributes:
        iteration: iterations completed.
        writers: number of ranks that wrote, over all nodes.
        files: number of their files in this part; 0 if it was reduced to some experts.
        operators: by name, the detail of each operator in these files.
        job: the launch that published it; empty if the manifest does not say.
    """

    iteration: int
    writers: int
    files: int
    operators: Mapping[str, str]
    job: str = ""

    @property
    def snapshot(self) -> tuple[int, int, str]:
        """Identifies the snapshot that the part belongs to."""
        return self.iteration, self.writers, self.job


class NodeInventory(NamedTuple):
    """Contents of a node's memory: its own parts, and by node the parts that it keeps for others."""

    own: tuple[NodePart, ...]
    copies: Mapping[str, tuple[NodePart, ...]]


class Restore(NamedTuple):
    """A part to restore.

    Attributes:
        of: the node whose part it is, and which lacks it.
        held_by: a node that has a copy.
        iteration: of the snapshot.
    """

    of: str
    held_by: str
    iteration: int


def to_restore(
    nodes: Mapping[str, NodeInventory], operators: Sequence[Operator], exact: bool, spoilt: Container[Restore] = ()
) -> list[Restore]:
    """Returns the parts to restore, so that the newest window that the nodes can complete together is whole again.

    A full snapshot is a window of one.  Newer snapshots that can be completed are restored, too: they belong to the
    current window.  If experts may be older (not ``exact``), every part that another node keeps a copy of is restored.
    Restores that failed are ``spoilt``.
    """
    if not exact:
        return _partial(nodes, spoilt)
    whole = _can_be_whole(nodes, spoilt)
    held = [
        AvailableCheckpoint(
            iteration, MEMORY, {name: detail for part, _ in parts for name, detail in part.operators.items()}
        )
        for iteration, parts in whole.items()
    ]
    way = next(recoveries(held, [one for one in operators if exact or one.expert is None], exact), None)
    if way is None:
        return []
    first = way.moments[0].iteration
    return [restore for i in sorted(whole) if i >= first for _, restore in whole[i] if restore is not None]


def _partial(nodes: Mapping[str, NodeInventory], spoilt: Container[Restore]) -> list[Restore]:
    """Returns restores for every missing part of every snapshot, as far as copies exist."""
    there = {part.snapshot for node in nodes.values() for parts in (node.own, *node.copies.values()) for part in parts}
    found = [_find(name, snapshot, nodes, spoilt) for snapshot in sorted(there) for name in nodes]
    return [restore for _, restore in filter(None, found) if restore is not None]


def _can_be_whole(
    nodes: Mapping[str, NodeInventory], spoilt: Container[Restore]
) -> dict[int, list[tuple[NodePart, Restore | None]]]:
    """Returns, by iteration, the parts of all nodes, each with its restore if its node lacks it."""
    whole: dict[int, list[tuple[NodePart, Restore | None]]] = {}
    there = {part.snapshot for node in nodes.values() for parts in (node.own, *node.copies.values()) for part in parts}
    for iteration, writers, job in sorted(there):
        found = [_find(name, (iteration, writers, job), nodes, spoilt) for name in nodes]
        parts = [one for one in found if one is not None]
        if sum(part.files for part, _ in parts) == writers:
            whole[iteration] = parts
    return whole


def _find(
    name: str, snapshot: tuple[int, int, str], nodes: Mapping[str, NodeInventory], spoilt: Container[Restore]
) -> tuple[NodePart, Restore | None] | None:
    """Returns a node's part, and its restore if the node lacks it; None if nobody has it."""
    if part := _part(nodes[name].own, snapshot):
        return part, None
    for holder, inventory in nodes.items():
        restore = Restore(name, holder, snapshot[0])
        if (part := _part(inventory.copies.get(name, ()), snapshot)) and restore not in spoilt:
            return part, restore
    return None


def _part(parts: Iterable[NodePart], snapshot: tuple[int, int, str]) -> NodePart | None:
    return next((part for part in parts if part.snapshot == snapshot), None)
