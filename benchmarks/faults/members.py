"""What happens to the nodes of an elastic job: losses and growths at random, some while an earlier one is under way.

Fewer than f nodes are lost at once, as elastic training promises to survive; *at once* until an iteration of all that
are there is complete.  At least MIN nodes are there, which are a majority of those with candidates for the controller.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moc.elastic.allocation import least_replicas

LOSSES = ("node", "launcher", "worker")
"""All processes of a node are killed at once; its launcher, with which the others end; its worker."""
COMES = "comes"
"""A lost node's command is started again."""
SETTLED, SOON, MOVE = "settled", "soon", "move"
"""When: some iterations after all before is over; a while after the one before, as a share of how long the last change
took; as soon as experts move."""
MOMENTS = ("training", "recovery", "move", "joining")
"""What the job did then: all trained; it had not gone on since a loss; experts moved; it trained, and a node was about
to be taken in."""


@dataclass(frozen=True)
class Cluster:
    """The job that things happen to.

    Attributes:
        nodes: MAX.
        least: MIN.
        slots: experts that a node can hold.
        experts: of a layer.
        replicas: f.
    """

    nodes: int
    least: int
    slots: int
    experts: int
    replicas: int

    def survives(self, nodes: int) -> int:
        """Simultaneous losses of so many nodes that leave every expert for certain."""
        return least_replicas(self.replicas, self.experts, nodes, self.slots) - 1


@dataclass(frozen=True)
class Happening:
    """One loss or growth.

    Attributes:
        action: one of :data:`LOSSES`, or :data:`COMES`.
        node: whose.
        when: :data:`SETTLED`, :data:`SOON` or :data:`MOVE`.
        share: from 0 to 1: of what the moment leaves open.
    """

    action: str
    node: int
    when: str
    share: float


def drawn(chance: random.Random, events: int, cluster: Cluster) -> tuple[Happening, ...]:
    """So many losses and growths, in order."""
    there, result = set(range(cluster.nodes)), []
    held, lost = frozenset(there), set[int]()  # who has experts since all was over, and who of these has lost them
    while len(result) < events:
        when = chance.choices((SETTLED, SOON, MOVE), (4, 3, 3))[0] if result else SETTLED
        if when == SETTLED:
            held, lost = frozenset(there), set()
        can_be_lost = possible(there, held, lost, cluster)
        absent = sorted(set(range(cluster.nodes)) - there)
        comes = absent and (not can_be_lost or chance.random() < 0.5)
        if not comes and not can_be_lost:
            continue  # nothing may be lost now, and nobody can come: not before all is over
        losses = LOSSES if len(there) > cluster.least else LOSSES[-1:]
        action = COMES if comes else chance.choice(losses)
        node = chance.choice(absent if comes else can_be_lost)
        if action == COMES:
            there.add(node)
        else:
            lost |= {node} & held
            there -= set() if action == "worker" else {node}
        result.append(Happening(action, node, when, chance.random()))
    return tuple(result)


def possible(there: Collection[int], held: Collection[int], lost: Collection[int], cluster: Cluster) -> list[int]:
    """Nodes that may be lost, or lose their worker, besides those that were lost already."""
    most = cluster.survives(len(held))
    return [node for node in sorted(there) if len({*lost, node} & set(held)) <= most]


def moment(events: Sequence[dict], since: float | None, size: int) -> str:
    """What a job does now: one of :data:`MOMENTS`.

    Args:
        events: of the job, in order.
        since: of the last loss or growth, or None.
        size: of the job, once all who are there train.
    """
    if since is None or events_after(events, since, "iteration", 2) and _size(events) == size:
        return "training"
    for event in reversed(events):
        if event["type"] in ("migration", "rebalance", "iteration", "start"):
            break
        if event["type"] == "inject":  # a move is slowed down
            return "move"
    going_on = next((e["type"] for e in reversed(events) if e["type"] in ("iteration", "generation", "start")), "")
    return "joining" if going_on in ("iteration", "start") and _size(events) < size else "recovery"


def events_after(events: Sequence[dict], since: float, kind: str, number: int) -> bool:
    """Whether so many events of a kind have come since a moment."""
    return sum(event["type"] == kind and event["time"] > since for event in events) >= number


def _size(events: Sequence[dict]) -> int:
    return next((event["world_size"] for event in reversed(events) if event["type"] == "start"), 0)
