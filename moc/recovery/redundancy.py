"""State that several nodes hold alike: data-parallel replicas that no ZeRO cuts (MoEtion, section 5.1).

Each node saves what its ranks hold, so that everything can restart from the memory of its node alone.  So a node that
keeps a copy of another one's snapshot has in its own snapshot what both hold alike, and receives only the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from moc.store.manifest import ALIKE

Told = Mapping[tuple[str, ...], Mapping[str, int]]
"""By the nodes that hold them alike, operators, and bytes of each node's copy."""


@dataclass(frozen=True)
class Redundancy:
    """What nodes of a job hold alike.

    Attributes:
        copies: by operator, how many nodes save each element, if several do.
        nbytes: by nodes, the bytes that all of them hold alike, once.
    """

    copies: Mapping[str, int] = field(default_factory=dict)
    nbytes: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def state(self, operators: Iterable[str]) -> dict[str, dict[str, list[str]]]:
        """What the manifest of a snapshot of operators says (:data:`moc.store.manifest.ALIKE`); empty if nothing."""
        found: dict[str, list[str]] = {}
        for name in operators:
            if name in self.copies:
                found.setdefault(str(self.copies[name]), []).append(name)
        return {ALIKE: found} if found else {}


def redundancy(stages: Iterable[Told]) -> Redundancy:
    """Joins what the pipeline stages tell."""
    copies: dict[str, int] = {}
    nbytes: dict[tuple[str, ...], int] = {}
    for told in stages:
        for nodes, operators in told.items():
            nbytes[nodes] = nbytes.get(nodes, 0) + sum(operators.values())
            copies |= dict.fromkeys(operators, len(nodes))
    return Redundancy(copies, nbytes)
