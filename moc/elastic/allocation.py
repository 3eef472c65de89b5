"""Computes the number of replicas of each expert (Lazarus, section 4.1, equation 1), and the domains of token dispatch.

Ranks are cut into domains, within which tokens are dispatched; each domain has all experts. Token counts are experts x
ranks integers for each layer and micro batch; domains limit their size. Gradients and survival span all domains.

Imports no numpy, so that flags can be read without it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from moc.elastic import ElasticError

MOST_RANKS = 256
"""Default maximum ranks of a domain: with 256 experts, the counts of a micro batch are 0.5 MB."""


@dataclass(frozen=True)
class Settings:
    """Settings of a plan.

    Attributes:
        slots: experts that a rank can hold.
        least: replicas of each expert on different nodes, if the slots suffice (f); fewer lost nodes lose no expert.
        everywhere: number of hottest experts on every node (h); None to choose it by load.
        ranks: ranks of a node.
        domain: maximum ranks that dispatch tokens to each other, if these have room for all experts.
    """

    slots: int
    least: int = 2
    everywhere: int | None = None
    ranks: int = 1
    domain: int = MOST_RANKS

    def domains(self, nodes: int, experts: int) -> tuple[int, ...]:
        """Returns the number of nodes of each domain."""
        hot = self.everywhere or 0
        return cut(nodes, self.ranks, self.slots * self.ranks - hot, experts - hot, self.domain)

    def most_everywhere(self, nodes: int, experts: int) -> int:
        """Returns the largest h that leaves a slot for every expert, and reduces no expert's replicas.

        Raises:
            ValueError: the slots do not suffice for one replica of each expert.
        """
        room = self.slots * self.ranks

        def fits(hot: int) -> bool:
            domains = dataclasses.replace(self, everywhere=hot).domains(nodes, experts)
            each = least_in_each(self.least, [least_replicas(self.least, experts, size, room) for size in domains])
            return all(hot <= most_everywhere(each, experts, size, room) for size in domains)

        return next(hot for hot in range(min(room, experts), -1, -1) if fits(hot))


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


def cut(nodes: int, ranks: int, slots: int, experts: int, most: int = MOST_RANKS) -> tuple[int, ...]:
    """Cuts nodes into the fewest domains that have at most ``most`` ranks and all experts.

    If such domains had no room for all experts, there are fewer and larger ones.

    Args:
        nodes: total number of nodes.
        ranks: ranks of a node.
        slots: expert slots of a node.
        experts: experts of a layer.
        most: maximum ranks of a domain; a node is in one domain.

    Returns:
        The number of nodes of each domain, larger ones first; they differ by one at most.
    """
    if experts:
        least = -(-experts // slots) if slots else nodes
    else:
        least = 0  # every node has all experts
    of_most = max(1, most // ranks)
    count = max(1, min(-(-nodes // of_most), nodes // max(1, least)))
    size, larger = divmod(nodes, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def least_in_each(wanted: int, fit: Sequence[int]) -> int:
    """Returns the fewest replicas per domain that reach the wanted total, or the total that fits.

    Args:
        wanted: total replicas (f).
        fit: by domain, the maximum replicas of every expert.
    """
    reached = min(wanted, sum(fit))
    return next(each for each in itertools.count(1) if sum(min(each, most) for most in fit) >= reached)


def spans(sizes: Sequence[int]) -> list[slice]:
    """Returns the slice of each domain in a sequence ordered by domain; sizes are in any unit."""
    stops = [*itertools.accumulate(sizes)]
    return [slice(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
