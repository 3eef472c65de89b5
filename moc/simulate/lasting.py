"""Computes how rarely a loss in an elastic job destroys an expert, which then requires a checkpoint.

Such a loss takes more nodes together than an expert has holders.  *Together* means before all workers have continued.

If a copy of the model spans several nodes, each has a *part* of it, and an expert's holders are nodes of its part.  All
nodes keep their state, including partial-model nodes.  Only a node that moves to another part, which has lost more,
discards its state (:mod:`moc.runtime.seating`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, prod

from moc.simulate.elastic import REGROUP_S, ElasticMembers, ElasticSettings

AT_ONCE = 4
"""Maximum number of nodes lost together that is considered; a larger loss counts as the loss of an expert."""
MEMBERSHIPS = 8
"""Numbers of nodes that are considered, from the smallest, where a loss hurts most."""

Tokens = Mapping[int, Sequence[int]]
"""Tokens of each expert, by layer."""
Survival = Callable[[int, int], float]
"""Probability that all of a part of the model is left, by its number of nodes and of nodes that lose their state."""


@dataclass(frozen=True)
class Lasting:
    """Losses that an elastic job survives without a checkpoint.

    Attributes:
        least: MIN nodes.
        most: MAX nodes.
        ranks: ranks of a node that hold experts of a layer.
        experts: experts of a layer.
        settings: settings of the plans.
        parts: layers with experts of each part of the model, one part per node; one part if each node has complete
            copies.
    """

    least: int
    most: int
    ranks: int
    experts: int
    settings: ElasticSettings
    parts: tuple[tuple[int, ...], ...] = ((0,),)

    def survivals(self, loads: Tokens | None = None) -> tuple[float, ...]:
        """Returns, by nodes lost together (from 1), the probability that every expert is left, at the worst membership.

        Args:
            loads: loads that plans follow; equal for all experts if unknown.
        """
        sizes = range(self.least, min(self.most, self.least + MEMBERSHIPS - 1) + 1)
        parts = [self._survival(layers, loads) for layers in self.parts]
        return tuple(min(survival(parts, n, lost, self.least) for n in sizes) for lost in range(1, AT_ONCE + 1))

    def _survival(self, layers: Sequence[int], loads: Tokens | None) -> Survival:
        known, alike, parts = loads or {}, (1,) * self.experts, len(self.parts)
        rows = dict.fromkeys(tuple(known.get(layer, alike)) for layer in layers)  # equal layers have equal plans
        copies = self.least // parts, self.most // parts
        return ElasticMembers(*copies, ranks=self.ranks, stages=(tuple(rows),), settings=self.settings).survival

    def rarer(self, mtbf_s: float, loads: Tokens | None = None) -> float:
        """Returns the number of losses per loss that destroys an expert.

        The probability of another loss before all have continued is the probability of a loss in :data:`REGROUP_S`
        seconds.

        Args:
            mtbf_s: seconds between losses.
            loads: as in :meth:`survivals`.
        """
        again, fatal, here = min(1.0, REGROUP_S / mtbf_s), 0.0, 1.0
        for number, survives in enumerate((*self.survivals(loads), 0.0)):
            last = number == AT_ONCE
            fatal += here * (1.0 if last else 1 - again) * (1 - survives)
            here *= again
        return 1 / max(fatal, 1e-12)


def survival(parts: Sequence[Survival], nodes: int, lost: int, least: int) -> float:
    """Returns the probability that a loss of ``lost`` random nodes leaves all of every part of the model.

    Nodes beyond complete copies count as nodes without state, although partial-model nodes have some.

    Args:
        parts: probabilities of the parts of the model.
        nodes: total number of nodes, at least the number of parts.
        lost: nodes lost together.
        least: minimum number of nodes to continue (MIN).
    """
    copies, waiting = divmod(nodes, len(parts))
    found = 0.0
    for of_parts in itertools.product(range(min(lost, copies) + 1), repeat=len(parts)):
        of_waiting = lost - sum(of_parts)
        if not 0 <= of_waiting <= waiting:
            continue
        ways = comb(waiting, of_waiting) * prod(comb(copies, of_part) for of_part in of_parts)
        kept = nodes_kept(copies, of_parts, nodes - lost, least)
        found += ways * prod(part(copies, copies - number) for part, number in zip(parts, kept, strict=True))
    return found / comb(nodes, lost) if lost <= nodes else 0.0


def nodes_kept(copies: int, lost: Sequence[int], left: int, least: int) -> list[int]:
    """Returns the nodes of each part that keep their state after a loss; pure, as is the controller's choice.

    A node moves to another part if that completes one more copy.  If several parts could give it, each counts as giving
    a node.  With fewer than MIN nodes left, all keep their state and wait.

    Args:
        copies: copies of the model before.
        lost: lost nodes of each part.
        left: remaining nodes, including nodes without a part.
        least: MIN nodes.
    """
    there = [copies - of_part for of_part in lost]
    later = left // len(lost) if left >= least else 0
    free = left - sum(there)
    move = max(0, sum(max(0, later - of_part) for of_part in there) - free)
    return [of_part - min(max(0, of_part - later), move) for of_part in there]
