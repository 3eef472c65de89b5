"""Which snapshots come back from other nodes' memory to nodes that have lost theirs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from moc.recovery.sources import MEMORY, AvailableCheckpoint, recoveries
from moc.state.operators import Operator


class NodePart(NamedTuple):
    """A node's part of a snapshot.

    Attributes:
        iteration: iterations completed.
        writers: ranks that wrote, over all nodes.
        files: how many of their files are in this part; none where it was reduced to some experts.
        operators: by name of those of which these files have anything, the detail.
        job: the launch that published it; empty where manifests do not tell.
    """

    iteration: int
    writers: int
    files: int
    operators: Mapping[str, str]
    job: str = ""

    @property
    def snapshot(self) -> tuple[int, int, str]:
        """What the parts of one snapshot have in common."""
        return self.iteration, self.writers, self.job


class NodeInventory(NamedTuple):
    """What a node has in its memory.

    Attributes:
        own: its parts.
        copies: by node, parts of others that it keeps.
    """

    own: tuple[NodePart, ...]
    copies: Mapping[str, tuple[NodePart, ...]]


class Restore(NamedTuple):
    """A part that comes back.

    Attributes:
        of: the node whose part it is, which does not have it.
        held_by: a node that does.
        iteration: of the snapshot.
    """

    of: str
    held_by: str
    iteration: int


def to_restore(
    nodes: Mapping[str, NodeInventory], operators: Sequence[Operator], exact: bool, spoilt: Container[Restore] = ()
) -> list[Restore]:
    """What has to come back, so that the newest window that the nodes can make whole together is whole again.

    A snapshot of everything is a window of one.  What is newer than the window, and can be made whole, comes back too:
    it belongs to the window under way.

    Args:
        nodes: what each has that is there.
        operators: of the model.
        exact: experts must be there, too; if not, they may be older, and in storage.
        spoilt: what was tried already, in vain.

    Returns:
        One for each node and snapshot of which it lacks its part; nothing if none does, or if there is no such window.
        Where experts may be older, older snapshots come back, too, of which others keep what is of use.
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
    """What nodes lack: of each snapshot that is not whole everywhere, whatever there is of it."""
    there = {part.snapshot for node in nodes.values() for parts in (node.own, *node.copies.values()) for part in parts}
    found = [_find(name, snapshot, nodes, spoilt) for snapshot in sorted(there) for name in nodes]
    return [restore for _, restore in filter(None, found) if restore is not None]


def _can_be_whole(
    nodes: Mapping[str, NodeInventory], spoilt: Container[Restore]
) -> dict[int, list[tuple[NodePart, Restore | None]]]:
    """By iteration the parts of all nodes, each with the way in which it comes back if its node does not have it."""
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
    """A node's part, and from where it comes if the node does not have it; None if nobody has it."""
    if part := _part(nodes[name].own, snapshot):
        return part, None
    for holder, inventory in nodes.items():
        restore = Restore(name, holder, snapshot[0])
        if (part := _part(inventory.copies.get(name, ()), snapshot)) and restore not in spoilt:
            return part, restore
    return None


def _part(parts: Iterable[NodePart], snapshot: tuple[int, int, str]) -> NodePart | None:
    return next((part for part in parts if part.snapshot == snapshot), None)
