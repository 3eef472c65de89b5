"""Random losses, departures and additions of nodes of an elastic job, some during the handling of an earlier one.

Fewer than f nodes are lost simultaneously, which elastic training survives.  Losses are *simultaneous* until an
iteration of all present nodes is complete.  At least MIN nodes are present, a majority of the controller candidates.
While a node departs, MIN other members are left, since the job would otherwise stop.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moc.elastic.allocation import feasible_replicas

LOSSES = ("node", "launcher", "worker")
"""Kinds of losses: all processes of a node are killed; its launcher, whose end ends the others; its worker."""
LEAVES = "leaves"
"""Planned departure: its launcher receives SIGTERM."""
COMES = "comes"
"""Addition: a lost node's command is restarted."""
SETTLED, SOON, MOVE = "settled", "soon", "move"
"""Times of an action: some iterations after all earlier actions are over; after the previous action, as a share of the
duration of the last change; as soon as experts move."""
MOMENTS = ("training", "recovery", "move", "joining")
"""States of the job at an action: all nodes train; training has not resumed since a loss; experts move; the job trains
and a node is joining."""


@dataclass(frozen=True)
class Cluster:
    """Sizes of the job.

    Attributes:
        nodes: MAX.
        least: MIN.
        slots: number of experts that a node can hold.
        experts: number of experts of a layer.
        replicas: f.
    """

    nodes: int
    least: int
    slots: int
    experts: int
    replicas: int

    def survives(self, nodes: int) -> int:
        """Returns how many of ``nodes`` nodes can be lost simultaneously without losing any expert."""
        return feasible_replicas(self.replicas, self.experts, nodes, self.slots) - 1


@dataclass(frozen=True)
class Happening:
    """A loss, a departure or an addition of a node.

    Attributes:
        action: one of :data:`LOSSES`, :data:`LEAVES` or :data:`COMES`.
        node: number of the node.
        when: :data:`SETTLED`, :data:`SOON` or :data:`MOVE`.
        share: random number from 0 to 1 that determines the exact time.
    """

    action: str
    node: int
    when: str
    share: float


def drawn(chance: random.Random, events: int, cluster: Cluster) -> tuple[Happening, ...]:
    """Draws ``events`` losses, departures and additions, in order."""
    there, result = set(range(cluster.nodes)), []
    held, lost, leaves = frozenset(there), set[int](), False  # nodes when last settled; lost since; one departs
    while len(result) < events:
        when = chance.choices((SETTLED, SOON, MOVE), (4, 3, 3))[0] if result else SETTLED
        if when == SETTLED:
            held, lost, leaves = frozenset(there), set(), False
        can_be_lost = possible(there, held, lost, cluster)
        absent = sorted(set(range(cluster.nodes)) - there)
        comes = absent and (not can_be_lost or chance.random() < 0.5)
        if not comes and not can_be_lost:
            continue  # no loss is allowed now, and no node is absent: draw again for a settled time
        members = len(held - lost)  # joining nodes may not train yet
        losses = LOSSES if len(there) > cluster.least else LOSSES[-1:]
        losses += (LEAVES,) if len(there) > cluster.least and members > cluster.least else ()
        if leaves and members <= cluster.least and not comes:
            continue
        action = COMES if comes else chance.choice(losses)
        node = chance.choice(absent if comes else can_be_lost)
        if action == LEAVES and node not in held - lost:
            continue
        if action == COMES:
            there.add(node)
        else:
            lost |= {node} & held
            there -= set() if action == "worker" else {node}
            leaves |= action == LEAVES
        result.append(Happening(action, node, when, chance.random()))
    return tuple(result)


def possible(there: Collection[int], held: Collection[int], lost: Collection[int], cluster: Cluster) -> list[int]:
    """Returns nodes that may be lost, or lose their worker, in addition to earlier losses."""
    most = cluster.survives(len(held))
    return [node for node in sorted(there) if len({*lost, node} & set(held)) <= most]


def moment(events: Sequence[dict], since: float | None, size: int) -> str:
    """Returns the current state of a job: one of :data:`MOMENTS`.

    Args:
        events: events of the job, in order.
        since: time of the last loss or addition, or None.
        size: number of workers once all present nodes train.
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
    """Returns whether at least ``number`` events of a kind are newer than ``since``."""
    return sum(event["type"] == kind and event["time"] > since for event in events) >= number


def _size(events: Sequence[dict]) -> int:
    return next((event["world_size"] for event in reversed(events) if event["type"] == "start"), 0)
