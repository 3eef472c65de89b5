"""Computes the number of replicas of each expert (Lazarus, section 4.1, equation 1)."""

from __future__ import annotations

from collections.abc import Sequence

from moc.elastic.errors import ElasticError


def least_replicas(wanted: int, experts: int, nodes: int, slots: int) -> int:
    """Returns f, or the largest smaller value that fits the slots; fewer simultaneous node losses lose no expert.

    Lazarus reduces f if it does not fit (section 6.2).

    Args:
        wanted: f.
        experts: experts of a layer.
        nodes: nodes that hold them; f replicas are on f nodes.
        slots: experts that a node can hold.

    Raises:
        ValueError: the slots do not suffice for one replica of each expert.
    """
    if nodes * slots < experts:
        raise ElasticError(
            f"{nodes} nodes of {slots} slots hold {nodes * slots} experts, and a layer has {experts}. Fix: give each "
            f"node at least {-(-experts // nodes)} slots",
            code="slots-too-few",
        )
    return min(wanted, nodes, nodes * slots // max(experts, 1))


def most_everywhere(wanted: int, experts: int, nodes: int, slots: int) -> int:
    """Returns the maximum number of experts that all nodes can hold while the remaining slots keep f for the others.

    Arguments and errors as in :func:`least_replicas`.
    """
    kept = least_replicas(wanted, experts, nodes, slots)

    def keep(hot: int) -> bool:
        others, left = experts - hot, slots - hot
        return nodes * left >= others and (not others or least_replicas(wanted, others, nodes, left) >= kept)

    return max(hot for hot in range(min(slots, experts) + 1) if keep(hot))


def allocate(loads: Sequence[int], slots: int, least: int) -> list[int]:
    """Returns the replicas of each expert in proportion to its tokens, at least ``least`` (equation 1).

    The computation is exact, in integers. Replicas ascend with the loads; equal loads are ordered by expert number.
    Without any load, all experts have the same weight.

    Args:
        loads: tokens of each expert.
        slots: total number of replicas.
        least: f, at most slots / experts.

    Returns:
        Replicas by expert; the sum is ``slots``.

    Raises:
        ValueError: there are fewer slots than ``least`` for each expert.
    """
    if slots < len(loads) * least:
        raise ElasticError(
            f"{slots} slots do not hold {least} replicas of each of {len(loads)} experts. Fix: raise the slots, or "
            "lower the replicas",
            code="slots-too-few",
        )
    replicas = [0] * len(loads)
    rest, left = sum(loads), slots
    for done, expert in enumerate(ascending(loads)):
        load, of = (loads[expert], rest) if rest else (1, len(loads) - done)
        replicas[expert] = max(load * left // of, least)
        left -= replicas[expert]
        rest -= loads[expert]
    return replicas


def allocate_distinct(loads: Sequence[int], nodes: int, slots: int, least: int, everywhere: int = 0) -> list[int]:
    """Returns the replicas of each expert as :func:`allocate`, but at most one per node.

    A second replica of an expert on a node would duplicate its weights. Instead, the dispatcher gives more tokens to
    the first replica, and another expert gets the slot.

    Args:
        loads: tokens of each expert.
        nodes: nodes that hold replicas.
        slots: slots of each node.
        least: f.
        everywhere: number of hottest experts with a replica on every node.

    Returns:
        Replicas by expert; the sum is ``nodes * slots``, or less if every node holds every expert.

    Raises:
        ValueError: the slots do not suffice.
    """
    order = ascending(loads)
    while everywhere < len(loads):
        others = order[: len(loads) - everywhere]
        found = allocate([loads[expert] for expert in others], nodes * (slots - everywhere), least)
        above = sum(count > nodes for count in found)
        if not above:
            replicas = dict(zip(others, found, strict=True))
            return [replicas.get(expert, nodes) for expert in range(len(loads))]
        everywhere += above
    return [nodes] * len(loads)


def ascending(loads: Sequence[int]) -> list[int]:
    """Returns the experts from the coldest to the hottest; equal ones by number."""
    return sorted(range(len(loads)), key=loads.__getitem__)
