"""Sequential selection of the experts of a partial checkpoint: a function of position alone."""

from __future__ import annotations


def sequential_experts(checkpoint: int, moe_layer: int, k: int, num_experts: int, ep: int) -> list[int]:
    """The k experts of one layer that a checkpoint saves (MoC, section 3.2, Figure 4).

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
        raise ValueError(f"K must be from 1 to {num_experts}, the experts of a layer, not {k}")
    first = (checkpoint + moe_layer) * k
    places = ((first + i) % num_experts for i in range(k))
    return sorted(place % ep * (num_experts // ep) + place // ep for place in places)
