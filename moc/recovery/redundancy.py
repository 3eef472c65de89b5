"""Describes state that is identical on several nodes: data-parallel replicas without ZeRO (MoEtion, section 5.1).

Each node saves the state of its ranks, so that all of them can restart from their node's memory. A node that keeps a
copy of another node's snapshot already has the identical data in its own. So it receives only the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from moc.store.manifest import REPLICAS_KEY

Told = Mapping[tuple[str, ...], Mapping[str, int]]
"""By nodes with identical state: operators, and bytes of each node's copy."""


@dataclass(frozen=True)
class Redundancy:
    """Identical state on the nodes of a job.

    Attributes:
        copies: by operator, how many nodes save each element, if several do.
        nbytes: by nodes, the bytes that are identical on all of them, counted once.
    """

    copies: Mapping[str, int] = field(default_factory=dict)
    nbytes: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def state(self, operators: Iterable[str]) -> dict[str, dict[str, list[str]]]:
        """Returns the manifest entry for a snapshot of operators (:data:`moc.store.manifest.REPLICAS_KEY`)."""
        found: dict[str, list[str]] = {}
        for name in operators:
            if name in self.copies:
                found.setdefault(str(self.copies[name]), []).append(name)
        return {REPLICAS_KEY: found} if found else {}


def redundancy(stages: Iterable[Told]) -> Redundancy:
    """Combines the reports of the pipeline stages."""
    copies: dict[str, int] = {}
    nbytes: dict[tuple[str, ...], int] = {}
    for told in stages:
        for nodes, operators in told.items():
            nbytes[nodes] = nbytes.get(nodes, 0) + sum(operators.values())
            copies |= dict.fromkeys(operators, len(nodes))
    return Redundancy(copies, nbytes)
