"""How seldom a loss takes state along in an elastic job: else nodes that are left go on without a checkpoint.

What a checkpoint is good for there is the rare loss after which an expert is on no node any more.  It happens if more
nodes are lost at once than each expert has holders; and *at once* is what is lost until all have gone on.

Where a copy of the model takes several nodes, each has a *part* of it, and an expert's holders are nodes of its part.
All keep their state, those that only help too; but one gives it up that goes over to another part, which has lost more
(:mod:`moc.runtime.seats`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, prod

from moc.simulate.elastic import REGROUP_S, ElasticMembers, ElasticSettings

AT_ONCE = 4
"""Most nodes lost at once that are looked at; of more, none leaves every expert."""
MEMBERSHIPS = 8
"""Numbers of nodes that are looked at, from the smallest on, where a loss hurts most."""

Tokens = Mapping[int, Sequence[int]]
"""By layer, the tokens of each expert."""
Survival = Callable[[int, int], float]
"""Of a part of the model: the probability that all of it is left, of so many nodes, when so many lose their state."""


@dataclass(frozen=True)
class Lasting:
    """What an elastic job survives without a checkpoint.

    Attributes:
        least: MIN nodes.
        most: MAX nodes.
        ranks: of a node, that hold experts of a layer.
        experts: of a layer.
        settings: of the plans.
        parts: of the model, of a node each: the layers with experts.  One part where each node has whole copies.
    """

    least: int
    most: int
    ranks: int
    experts: int
    settings: ElasticSettings
    parts: tuple[tuple[int, ...], ...] = ((0,),)

    def survivals(self, loads: Tokens | None = None) -> tuple[float, ...]:
        """By nodes lost at once, from 1 on: the probability that every expert is left, with the riskiest members.

        Args:
            loads: that plans follow; experts are alike if unknown.
        """
        sizes = range(self.least, min(self.most, self.least + MEMBERSHIPS - 1) + 1)
        parts = [self._survival(layers, loads) for layers in self.parts]
        return tuple(min(survival(parts, n, lost, self.least) for n in sizes) for lost in range(1, AT_ONCE + 1))

    def _survival(self, layers: Sequence[int], loads: Tokens | None) -> Survival:
        known, alike, parts = loads or {}, (1,) * self.experts, len(self.parts)
        rows = dict.fromkeys(tuple(known.get(layer, alike)) for layer in layers)  # layers alike are planned alike
        copies = self.least // parts, self.most // parts
        return ElasticMembers(*copies, ranks=self.ranks, stages=(tuple(rows),), settings=self.settings).survival

    def rarer(self, mtbf_s: float, loads: Tokens | None = None) -> float:
        """Losses for each one that takes an expert along.

        Another one follows before all have gone on with the probability of a loss in :data:`REGROUP_S` seconds.

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
    """Probability that a loss of ``lost`` of so many nodes, each choice alike, leaves all of every part of the model.

    Nodes beyond whole copies count as if they had no state; those that help have more than is counted here.

    Args:
        parts: of the model.
        nodes: in all, at least as many as there are parts.
        lost: at once.
        least: nodes with which the job goes on (MIN).
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
    """Nodes of each part that keep their state after a loss; pure, as the controller's choice is.

    A node goes over to another part where that makes one more copy.  Where it could be of one of several parts, each
    counts as if it were its own.  If fewer than MIN nodes are left, all keep what they have, and wait.

    Args:
        copies: of the model before.
        lost: nodes of each part.
        left: nodes that are left, with those that have no part.
        least: MIN nodes.
    """
    there = [copies - of_part for of_part in lost]
    later = left // len(lost) if left >= least else 0
    free = left - sum(there)
    move = max(0, sum(max(0, later - of_part) for of_part in there) - free)
    return [of_part - min(max(0, of_part - later), move) for of_part in there]
