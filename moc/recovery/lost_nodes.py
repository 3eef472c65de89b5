"""Which snapshots come back from other nodes' memory to nodes that have lost theirs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple


class Part(NamedTuple):
    """A node's part of a snapshot.

    Attributes:
        iteration: iterations completed.
        writers: ranks that wrote, over all nodes.
        files: how many of their files are in this part.
    """

    iteration: int
    writers: int
    files: int


class Inventory(NamedTuple):
    """What a node has in its memory.

    Attributes:
        own: its parts.
        copies: by node, parts of others that it keeps.
    """

    own: tuple[Part, ...]
    copies: Mapping[str, tuple[Part, ...]]


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


def to_restore(nodes: Mapping[str, Inventory], spoilt: Container[Restore] = ()) -> list[Restore]:
    """What has to come back, so that the newest snapshot that the nodes can make whole together is whole again.

    Args:
        nodes: what each has that is there.
        spoilt: what was tried already, in vain.

    Returns:
        One for each node that lacks its part; nothing if none does, or if there is no such snapshot.
    """
    whose = {part[:2] for node in nodes.values() for parts in (node.own, *node.copies.values()) for part in parts}
    for iteration, writers in sorted(whose, reverse=True):
        found = {name: _find(name, (iteration, writers), nodes, spoilt) for name in nodes}
        if sum(files for files, _ in found.values()) == writers:
            return [restore for _, restore in found.values() if restore is not None]
    return []


def _find(
    name: str, snapshot: tuple[int, int], nodes: Mapping[str, Inventory], spoilt: Container[Restore]
) -> tuple[int, Restore | None]:
    """How many files a node's part has, and from where it comes if the node does not have it."""
    if files := _files(nodes[name].own, snapshot):
        return files, None
    for holder, inventory in nodes.items():
        restore = Restore(name, holder, snapshot[0])
        if (files := _files(inventory.copies.get(name, ()), snapshot)) and restore not in spoilt:
            return files, restore
    return 0, None


def _files(parts: Iterable[Part], snapshot: tuple[int, int]) -> int:
    return next((part.files for part in parts if part[:2] == snapshot), 0)
