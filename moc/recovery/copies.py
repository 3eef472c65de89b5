"""Selects copies of some operators: those still needed when a run resumes, and missing ones.

Other nodes may receive fewer experts of a snapshot than a node's own memory has. So an expert's newest copy may be
older than its newest state. If several nodes save parts of an expert, its copies are complete only with all parts. So
each node's memory, and each holder, retains the copied version until a newer one has copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from moc.recovery.carrying import of_use
from moc.recovery.inventory import Summary
from moc.recovery.lost_nodes import NodeInventory
from moc.recovery.sources import MEMORY, AvailableCheckpoint


def partly_copied(nodes: Mapping[str, NodeInventory]) -> bool:
    """Returns whether other nodes received only some operators of any snapshot in memory."""
    return any(part.copied is not None for node in nodes.values() for part in _all(node))


def copies_of_use(nodes: Mapping[str, NodeInventory], experts: Collection[str], upto: int) -> set[int]:
    """Returns the iterations, up to ``upto``, whose copies have the newest copied version of an expert."""
    kept = (
        of_use([_held(part) for part in parts if part.iteration <= upto], experts)
        for node in nodes.values()
        for parts in node.copies.values()
    )
    return {iteration for found in kept for iteration, wanted in found.items() if wanted}


def to_copy(
    own: Iterable[Summary],
    copies: Iterable[Summary],
    experts: Collection[str],
    resumed: Collection[int],
    loaded: Mapping[str, Collection[int]],
) -> dict[int, dict[str, str]]:
    """Returns, by iteration, the operators of a node's snapshots that a holder still lacks, with their details.

    These are:

    * dense operators of the snapshots that the run resumes from,
    * experts that were being copied,
    * operators without any version at the holder, in the version that the run resumes with.

    Args:
        own: parts in the node's own memory, none newer than the resumed iteration.
        copies: the holder's copies of the node's parts, none newer than the resumed iteration.
        experts: operators that may be older than the rest.
        resumed: iterations of the snapshots that the run resumes from.
        loaded: by operator, the iterations of the state that the run resumes with, and of later gradients.
    """
    newest: dict[str, int] = {}
    for part in copies:
        newest |= {name: max(part.iteration, newest.get(name, 0)) for name in part.operators}
    found: dict[int, dict[str, str]] = {}
    for part in own:
        i, coming = part.iteration, part.operators.keys() if part.copied is None else part.copied
        wanted = {
            name: detail
            for name, detail in part.details.items()
            if (name in experts and name in coming and newest.get(name, -1) < i)
            or (name not in newest and i in loaded.get(name, ()))
            or (name not in experts and i in resumed)
        }
        if wanted:
            found[i] = wanted
    return found


def _all(node: NodeInventory) -> Iterable[Summary]:
    return (part for parts in (node.own, *node.copies.values()) for part in parts)


def _held(part: Summary) -> AvailableCheckpoint:
    return AvailableCheckpoint(part.iteration, MEMORY, part.details)
