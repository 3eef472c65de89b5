"""Which experts a partial checkpoint saves, in turn: a function of position alone."""

from __future__ import annotations


def sequential_experts(checkpoint: int, moe_layer: int, k: int, num_experts: int, ep: int) -> list[int]:
    """The k experts of one layer that a checkpoint saves (MoC, section 3.2, Figure 4).

    The experts of a layer stand in a circle, in which neighbours belong to different expert-parallel ranks.  Each
    checkpoint takes the next k of them, and each layer starts where the one before it stops.  So what a checkpoint
    takes from any layers that follow each other is one arc of a circle whose places belong to ranks 0, 1, ... in turn:
    no rank saves more than one expert above any other, in all of the model as in a pipeline stage.  And every expert is
    saved at least once in any ceil(num_experts / k) checkpoints.

    Args:
        checkpoint: number of the checkpoint, from 0.
        moe_layer: number of the layer among those with experts, from 0.
        k: K_pec, how many to save.
        num_experts: experts of the layer.
        ep: expert-parallel ranks; each holds num_experts / ep neighbouring experts.

    Returns:
        Their global numbers, ascending.
    """
    if not 1 <= k <= num_experts:
        raise ValueError(f"K must be from 1 to {num_experts}, the experts of a layer, not {k}")
    first = (checkpoint + moe_layer) * k
    places = ((first + i) % num_experts for i in range(k))
    return sorted(place % ep * (num_experts // ep) + place // ep for place in places)
