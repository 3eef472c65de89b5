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

MAX_DOMAIN_RANKS = 256
"""Default maximum ranks of a domain: with 256 experts, the counts of a micro batch are 0.5 MB."""


@dataclass(frozen=True)
class PlanSettings:
    """Settings of a plan.

    Attributes:
        slots: experts that a rank can hold.
        min_replicas: replicas of each expert on different nodes, if the slots suffice (f); fewer simultaneous node
            losses lose no expert.
        everywhere: number of hottest experts on every node (h); None to choose it by load.
        ranks: ranks of a node.
        max_domain_ranks: maximum ranks that dispatch tokens to each other, if these have room for all experts.
        mtbf_s: seconds between losses of nodes in the job, for the choice of h.
    """

    slots: int
    min_replicas: int = 2
    everywhere: int | None = None
    ranks: int = 1
    max_domain_ranks: int = MAX_DOMAIN_RANKS
    mtbf_s: float = 3600.0

    def domain_sizes(self, nodes: int, experts: int) -> tuple[int, ...]:
        """Returns the number of nodes of each domain."""
        everywhere = self.everywhere or 0
        return domain_sizes(
            nodes, self.ranks, self.slots * self.ranks - everywhere, experts - everywhere, self.max_domain_ranks
        )

    def max_everywhere(self, nodes: int, experts: int) -> int:
        """Returns the largest h that leaves a slot for every expert, and reduces no expert's replicas.

        Raises:
            ValueError: the slots do not suffice for one replica of each expert.
        """
        slots = self.slots * self.ranks

        def fits(hot: int) -> bool:
            domains = dataclasses.replace(self, everywhere=hot).domain_sizes(nodes, experts)
            per_domain = min_replicas_per_domain(
                self.min_replicas, [feasible_replicas(self.min_replicas, experts, size, slots) for size in domains]
            )
            return all(hot <= max_experts_everywhere(per_domain, experts, size, slots) for size in domains)

        return next(hot for hot in range(min(slots, experts), -1, -1) if fits(hot))


def feasible_replicas(min_replicas: int, experts: int, nodes: int, slots: int) -> int:
    """Returns f, or the largest smaller value that fits the slots; fewer simultaneous node losses lose no expert.

    Lazarus reduces f of all experts if it does not fit (section 6.2).  Here, this is the minimum: as many experts as
    possible have one more (:func:`allocate_distinct`).

    Args:
        min_replicas: f.
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
    return min(min_replicas, nodes, nodes * slots // max(experts, 1))


def max_experts_everywhere(min_replicas: int, experts: int, nodes: int, slots: int) -> int:
    """Returns the maximum number of experts that all nodes can hold while the remaining slots keep f for the others.

    Arguments and errors as in :func:`feasible_replicas`.
    """
    feasible = feasible_replicas(min_replicas, experts, nodes, slots)
    if feasible < min(min_replicas, nodes):
        return 0  # an expert on all nodes would take replicas that others lack

    def is_feasible(hot: int) -> bool:
        other_experts, free_slots = experts - hot, slots - hot
        return nodes * free_slots >= other_experts and (
            not other_experts or feasible_replicas(min_replicas, other_experts, nodes, free_slots) >= feasible
        )

    return max(hot for hot in range(min(slots, experts) + 1) if is_feasible(hot))


def allocate_replicas(loads: Sequence[int], slots: int, min_replicas: int) -> list[int]:
    """Returns the replicas of each expert in proportion to its tokens, at least ``min_replicas`` (equation 1).

    The computation is exact, in integers. Replicas ascend with the loads; equal loads are ordered by expert number.
    Without any load, all experts have the same weight.

    Args:
        loads: tokens of each expert.
        slots: total number of replicas.
        min_replicas: f, at most slots / experts.

    Raises:
        ValueError: there are fewer slots than ``min_replicas`` for each expert.
    """
    if slots < len(loads) * min_replicas:
        raise ElasticError(
            f"{slots} slots do not hold {min_replicas} replicas of each of {len(loads)} experts. Fix: raise the slots, "
            "or lower the replicas",
            code="slots-too-few",
        )
    replicas = [0] * len(loads)
    remaining_tokens, remaining_slots = sum(loads), slots
    for position, expert in enumerate(experts_by_load(loads)):
        load, total_load = (loads[expert], remaining_tokens) if remaining_tokens else (1, len(loads) - position)
        replicas[expert] = max(load * remaining_slots // total_load, min_replicas)
        remaining_slots -= replicas[expert]
        remaining_tokens -= loads[expert]
    return replicas


def allocate_distinct(
    loads: Sequence[int], nodes: int, slots: int, min_replicas: int, everywhere: int = 0
) -> list[int]:
    """Returns the replicas of each expert as :func:`allocate_replicas`, but at most one per node.

    A second replica of an expert on a node would duplicate its weights. Instead, the dispatcher gives more tokens to
    the first replica, and another expert gets the slot.

    If the slots hold less than ``min_replicas`` of each expert, they are spread evenly: only the coldest experts have
    one replica less than the others.

    Args:
        loads: tokens of each expert.
        nodes: nodes that hold replicas.
        slots: slots of each node.
        min_replicas: f.
        everywhere: number of hottest experts with a replica on every node.

    Returns:
        Replicas by expert; the sum is ``nodes * slots``, or less if every node holds every expert.

    Raises:
        ValueError: the slots do not suffice.
    """
    order = experts_by_load(loads)
    while everywhere < len(loads):
        remaining = order[: len(loads) - everywhere]
        replica_counts = _allocate([loads[expert] for expert in remaining], nodes * (slots - everywhere), min_replicas)
        excess = sum(count > nodes for count in replica_counts)
        if not excess:
            replicas = dict(zip(remaining, replica_counts, strict=True))
            return [replicas.get(expert, nodes) for expert in range(len(loads))]
        everywhere += excess
    return [nodes] * len(loads)


def _allocate(loads: Sequence[int], slots: int, min_replicas: int) -> list[int]:
    """Returns replicas in proportion to ascending loads, or evenly if ``min_replicas`` of each expert do not fit."""
    if not len(loads) <= slots < len(loads) * min_replicas:
        return allocate_replicas(loads, slots, min_replicas)
    base, larger = divmod(slots, len(loads))
    return [base] * (len(loads) - larger) + [base + 1] * larger


def experts_by_load(loads: Sequence[int]) -> list[int]:
    """Returns the experts from the coldest to the hottest; equal ones by number."""
    return sorted(range(len(loads)), key=loads.__getitem__)


def domain_sizes(
    nodes: int, ranks: int, slots: int, experts: int, max_ranks: int = MAX_DOMAIN_RANKS
) -> tuple[int, ...]:
    """Cuts nodes into the fewest domains that have at most ``max_ranks`` ranks and all experts.

    If such domains had no room for all experts, there are fewer and larger ones.

    Args:
        nodes: total number of nodes.
        ranks: ranks of a node.
        slots: expert slots of a node.
        experts: experts of a layer.
        max_ranks: maximum ranks of a domain; a node is in one domain.

    Returns:
        The number of nodes of each domain, larger ones first; they differ by one at most.
    """
    if experts:
        min_nodes = -(-experts // slots) if slots else nodes
    else:
        min_nodes = 0  # every node has all experts
    max_nodes = max(1, max_ranks // ranks)
    count = max(1, min(-(-nodes // max_nodes), nodes // max(1, min_nodes)))
    size, larger = divmod(nodes, count)
    return (size + 1,) * larger + (size,) * (count - larger)


def min_replicas_per_domain(min_replicas: int, feasible: Sequence[int]) -> int:
    """Returns the fewest replicas per domain that reach the wanted total, or the total that fits.

    Args:
        min_replicas: total replicas (f).
        feasible: by domain, the maximum replicas of every expert.
    """
    total = min(min_replicas, sum(feasible))
    return next(
        copies for copies in itertools.count(1) if sum(min(copies, max_feasible) for max_feasible in feasible) >= total
    )


def domain_slices(sizes: Sequence[int]) -> list[slice]:
    """Returns the slice of each domain in a sequence ordered by domain; sizes are in any unit."""
    ends = [*itertools.accumulate(sizes)]
    return [slice(stop - size, stop) for stop, size in zip(ends, sizes, strict=True)]
