"""Selection of the experts of partial checkpoints, and the age at which a fault finds the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from moc.policy.errors import PolicyError


def sequential_experts(checkpoint: int, moe_layer: int, k: int, num_experts: int, ep: int) -> list[int]:
    """The k experts of one layer that a checkpoint saves (MoC, section 3.2, Figure 4): a function of position alone.

    The experts of a layer form a circle in which neighbours belong to different expert-parallel ranks.  Each checkpoint
    takes the next k of them, and each layer starts where the previous one stops, so the experts taken from consecutive
    layers form one arc over ranks 0, 1, ... in turn.  Hence no rank saves more than one expert more than any other, in
    the whole model and in each pipeline stage, and every expert is saved at least once in any ceil(num_experts / k)
    checkpoints.

    Args:
        checkpoint: index of the checkpoint, from 0.
        moe_layer: index of the layer among those with experts, from 0.
        k: K_pec, number of experts to save.
        num_experts: experts of the layer.
        ep: expert-parallel ranks, each holding num_experts / ep consecutive experts.

    Returns:
        Global expert numbers, ascending.
    """
    if not 1 <= k <= num_experts:
        raise PolicyError(
            f"K = {k} is not possible with {num_experts} experts in a layer. Fix: set K from 1 to {num_experts}",
            code="experts-per-snapshot-invalid",
        )
    first = (checkpoint + moe_layer) * k
    places = ((first + i) % num_experts for i in range(k))
    return sorted(place % ep * (num_experts // ep) + place // ep for place in places)


def load_aware_experts(unsaved: Mapping[int, Sequence[int]], k: int, ep: int) -> dict[int, list[int]]:
    """Selects the k experts of every layer that a checkpoint saves (PEC, section 3.1, Algorithm 1).

    From the last layer to the first, the k experts with the most unsaved tokens are taken (ties: lowest number), except
    those whose expert-parallel rank has already contributed ceil(layers * k / ep).  Where that leaves a layer with
    fewer than k, Algorithm 1 would save fewer; here exactly k are saved: the rest comes from full ranks, each time from
    the rank with the fewest contributed so far, its expert with the most unsaved tokens (ties: lowest number).  So the
    capacity is exceeded only where a layer leaves no other choice.

    Args:
        unsaved: tokens given to each expert since it was last saved, by layer; identical on all ranks.
        k: K_pec, number of experts to save in each layer.
        ep: expert-parallel ranks (N_rank), each holding an equal number of consecutive experts of a layer.

    Returns:
        Expert numbers, ascending, by layer in the order of ``unsaved``.

    Raises:
        ValueError: k or ep does not fit a layer's experts.
    """
    for layer, tokens in unsaved.items():
        if not 1 <= k <= len(tokens):
            raise PolicyError(
                f"K = {k} is not possible with the {len(tokens)} experts of layer {layer}. Fix: set K from 1 to "
                f"{len(tokens)}",
                code="experts-per-snapshot-invalid",
            )
        if ep < 1 or len(tokens) % ep:
            raise PolicyError(
                f"the {len(tokens)} experts of layer {layer} are not a multiple of ep = {ep}. Fix: change the "
                "number of experts, or --expert-model-parallel-size",
                code="experts-indivisible",
            )
    capacity = -(-len(unsaved) * k // ep)
    given = [0] * ep
    chosen = {layer: _of_layer(unsaved[layer], k, given, capacity) for layer in sorted(unsaved, reverse=True)}
    return {layer: chosen[layer] for layer in unsaved}


def _of_layer(tokens: Sequence[int], k: int, given: list[int], capacity: int) -> list[int]:
    """Selects k experts, and adds them to ``given``, the count by rank."""
    per_rank = len(tokens) // len(given)
    waiting = sorted(range(len(tokens)), key=lambda expert: (-tokens[expert], expert))
    chosen = []
    for expert in waiting:
        if len(chosen) < k and given[expert // per_rank] < capacity:
            chosen.append(expert)
            given[expert // per_rank] += 1
    while len(chosen) < k:
        left = (expert for expert in waiting if expert not in chosen)
        expert = min(left, key=lambda e: (given[e // per_rank], -tokens[e], e))
        chosen.append(expert)
        given[expert // per_rank] += 1
    return sorted(chosen)


def persist_selection(
    candidates: Mapping[int, Sequence[int]], persisted: Mapping[int, Sequence[int]], k: int, ep: int
) -> dict[int, list[int]]:
    """Selects K_persist experts of every layer to persist, of the K_snapshot in a snapshot (MoC, section 5.1).

    The least recently persisted experts come first; ties go to the expert-parallel rank with the fewest selected so
    far, then to the lowest number.  Thus no recurring candidate starves, and ranks write about equally as long as
    experts are saved in turn.  The paper does not specify the selection.

    Args:
        candidates: experts in the snapshot, by layer.
        persisted: by layer and expert, a growing number that marks when the expert was last persisted.
        k: K_persist; a layer with at most k candidates persists all of them.
        ep: expert-parallel ranks, each holding an equal number of consecutive experts of a layer.

    Returns:
        Expert numbers by layer, ascending.
    """
    given, chosen = [0] * ep, {}
    for layer, waiting in candidates.items():
        when, per_rank = persisted[layer], len(persisted[layer]) // ep
        left, taken = list(waiting), []
        while left and len(taken) < k:
            expert = min(left, key=lambda e: (when[e], given[e // per_rank], e))
            left.remove(expert)
            taken.append(expert)
            given[expert // per_rank] += 1
        chosen[layer] = sorted(taken)
    return chosen


def turn(partial: int, period: int, persist_every: int) -> int:
    """The position in the rotation after some partial snapshots.

    If every ``persist_every``-th snapshot is persisted and ``persist_every`` shares a divisor with ``period``, the
    partial snapshots after which the same experts are saved again, storage would receive the same experts for ever.  So
    each time storage has seen its cycle, the rotation pauses for one snapshot, which shifts the cycle.
    """
    together = math.lcm(period, persist_every)
    return partial - partial // together if together < period * persist_every else partial


class Ages(NamedTuple):
    """Mean and maximum age of a layer's experts at a fault, relative to the newest checkpoint."""

    mean: float
    oldest: int

    def times(self, iterations: int) -> Ages:
        """The ages in iterations, for checkpoints that many iterations apart."""
        return Ages(self.mean * iterations, self.oldest * iterations)


@cache
def ages(num_experts: int, k_snapshot: int, k_kept: int, every: int = 1, persist_every: int = 1) -> Ages:
    """Ages in checkpoints of equally busy experts that are saved in turn (MoC-System, sections 3.2 and 5.1).

    Args:
        num_experts: N.
        k_snapshot: experts of each layer in a snapshot.
        k_kept: those of them that are kept: K_persist in storage, K_snapshot in memory.
        every: snapshots per kept one: 1 in memory.
        persist_every: snapshots per persisted one, which :func:`turn` compensates for.
    """
    period, kept = num_experts // math.gcd(num_experts, k_snapshot), [0] * num_experts
    rounds, total, oldest = 4 * num_experts, 0, 0
    for checkpoint in range(1, 2 * rounds + 1):
        number = turn(checkpoint * every, period, persist_every)
        snapshot = sequential_experts(number, 0, k_snapshot, num_experts, 1)
        for expert in persist_selection({0: snapshot}, {0: kept}, k_kept, 1)[0]:
            kept[expert] = checkpoint
        if checkpoint > rounds:
            total += sum(checkpoint - when for when in kept)
            oldest = max(oldest, checkpoint - min(kept))
    return Ages(total / rounds / num_experts, oldest)
